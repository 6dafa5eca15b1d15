"""Who saves, and when: ``ModelCheckpoint`` in a run that resumes, and one rank alone."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import Descending, batches, make_trainer


def saved_by(layout: str, directory: Path, steps: int, resume: Path | None) -> tuple[list[str], list[float]]:
    """Runs on each rank: steps of two micro-batches, of which each is saved."""
    module = Descending()
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    settings: dict[str, Any] = {"max_steps": steps, "accumulate_grad_batches": 2, "callbacks": [saver]}
    trainer = make_trainer(LAYOUTS[layout].make(), enable_checkpointing=True, **settings)
    trainer.fit(module, batches(LAYOUTS[layout].data_size), ckpt_path=resume)
    return sorted(path.name for path in directory.iterdir()), module.losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(["megatron3-dp2", "fsdp2-tp2", "ddp-2"], "fsdp2-tp2", "ddp-2"))
def test_the_step_of_the_checkpoint_is_not_saved_again(pool2: Pool, tmp_path: Path, layout: str) -> None:
    """Behind the first micro-batch of the next one, which under Megatron-FSDP is an error."""
    files, losses = pool2.run(saved_by, layout, tmp_path / "whole", 3, None, trainer=True)[0]
    pool2.run(saved_by, layout, tmp_path / "parts", 1, None, trainer=True)
    again, rest = pool2.run(saved_by, layout, tmp_path / "parts", 3, tmp_path / "parts/step=1.ckpt", trainer=True)[0]
    assert again == files == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert rest == pytest.approx(losses[2:], abs=1e-6)


class Alone(Descending):
    """What runs with ``DDPStrategy`` of many a user: the first rank saves."""

    path = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(self.path)


def save_on_one_rank(layout: str, path: Path) -> None:
    """Runs on each rank."""
    module = Alone()
    module.path = str(path)
    strategy = LAYOUTS[layout].make(timeout=timedelta(seconds=4))
    make_trainer(strategy, max_steps=2).fit(module, batches(LAYOUTS[layout].data_size))


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(["fsdp2-dp2", "ddp-2"], "ddp-2"))
def test_one_rank_alone_is_told(pool2: Pool, tmp_path: Path, layout: str) -> None:
    """Before it meets the others in the wrong collective, which would end the process."""
    with pytest.raises(RankFailed, match="rank 0 waits in save_checkpoint for rank 1: every rank writes or sends"):
        pool2.run(save_on_one_rank, layout, tmp_path / "never.ckpt", trainer=True)
    assert not (tmp_path / "never.ckpt").exists()
