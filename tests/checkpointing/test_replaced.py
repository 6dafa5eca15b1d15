"""What another run does to a checkpoint under the name that this one reads or deletes."""

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.files.reading import read_one_edition
from lightning_automodel.checkpointing.files.staging import remove_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, make_trainer, world_size


class Replaced(Recorder):
    """Another run saves under the name of the checkpoint between two reads of it."""

    path: Path
    other: Path | None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Runs when all but tensors has been read."""
        if dist.get_rank() == 0:
            if self.other is None:
                Location.of(self.path).remove()
            else:
                Location.of(self.other).swap(Location.of(self.path))


def load_while_replaced(folder: Path, is_deleted: bool) -> str:
    """Runs on each rank."""
    paths = [folder / f"{count}.ckpt" for count in (1, 2)]
    for count, path in enumerate(paths, 1):
        trainer = make_trainer(FSDP2TPStrategy(), max_steps=count)
        trainer.fit(Recorder(), batches(world_size()))
        trainer.save_checkpoint(path)
    module = Replaced()
    module.path, module.other = paths[0], None if is_deleted else paths[1]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        make_trainer(FSDP2TPStrategy(), max_steps=4).fit(module, batches(world_size()), ckpt_path=paths[0])
    return str(caught.value)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_checkpoint_that_another_run_replaces_while_it_is_loaded(tmp_path: Path, pool2: Pool, is_deleted: bool) -> None:
    """The step of one checkpoint met the weights of another; one that was deleted ended in an assertion of torch's."""
    for message in pool2.run(load_while_replaced, tmp_path, is_deleted, trainer=True):
        assert f"{tmp_path / '1.ckpt'} was replaced or deleted while it was loaded" in message


def test_names_of_two_runs_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another run had deleted a moment before ended in an error."""
    (tmp_path / "a.ckpt").mkdir()
    path, is_folder = Location.of(tmp_path / "a.ckpt"), Location.is_folder

    def deleted_meanwhile(location: Location) -> bool:
        found = is_folder(location)
        if location == path:
            shutil.rmtree(location.path, ignore_errors=True)
        return found

    monkeypatch.setattr(Location, "is_folder", deleted_meanwhile)
    remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def read_where_one_rank_cannot(folder: Path) -> str:
    """Runs on each rank: a checkpoint holds a class of a module that only rank 0 finds."""
    path, is_writer = folder / "1.ckpt", dist.get_rank() == 0
    if is_writer:
        (folder / "settings_of_a_user.py").write_text("class Settings:\n    pass\n")
        sys.path.insert(0, str(folder))
        torch.save({"state_dict": {}, "settings": importlib.import_module("settings_of_a_user").Settings()}, path)
    dist.barrier()
    with pytest.raises((ModuleNotFoundError, ValueError)) as caught:
        read_one_edition(Location.of(path), weights_only=False)
    return str(caught.value)


def test_checkpoint_that_one_rank_cannot_read(tmp_path: Path, pool2: Pool) -> None:
    """The other one waited for it, or went on without."""
    first, second = pool2.run(read_where_one_rank_cannot, tmp_path)
    assert second == "No module named 'settings_of_a_user'"
    assert first == f"{tmp_path / '1.ckpt'} could not be read by other ranks. rank 1: {second}"
