"""A fit that Ctrl-C ends names the newest complete checkpoint and the command that goes on from it."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_automodel.command.interruption import GoOnCommand, describe_stop


class Interrupted(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def test_the_newest_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_automodel")
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    words = ["fit", "--config=my run.yaml", "--ckpt_path", "old.ckpt"]
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[saving, GoOnCommand(words)], logger=False, default_root_dir=tmp_path, max_steps=9
    )
    with pytest.raises(SystemExit, match="1"):
        trainer.fit(Interrupted())
    path = tmp_path / "saved" / "step=4.ckpt"
    (line,) = [record.getMessage() for record in caplog.records if "Ctrl-C" in record.getMessage()]
    assert line == (
        "stopped by Ctrl-C after step 5; go on from the newest complete checkpoint with\n"
        f"  lightning-automodel fit '--config=my run.yaml' --ckpt_path={path}"
    )


def test_without_a_checkpoint_it_says_so() -> None:
    assert "there is none to go on from" in describe_stop(3, None, ["fit"])
