"""Disks that are full or read-only: all ranks say which file, and the run goes on from the checkpoint before."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_automodel.cli import main
from lightning_automodel.strategies.checkpoints.plain_files import StagedCheckpointIO
from lightning_automodel.testing.pool import Nursery, Pool
from tests.faults.chains import STEPS, Story, train
from tests.support.marks import with_long
from tests.support.training import Recorder, batches, make_trainer

BALLAST = "ballast"


class Spoil(Callback):
    """Spoils the disk at the third step."""

    def __init__(self, how: Callable[[Path], None], disk: Path) -> None:
        self.how, self.disk = how, disk

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.is_global_zero:
            self.how(self.disk)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / BALLAST).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def protect(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def mend(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    (disk / BALLAST).unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own. Permissions would not do: root writes where it may not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def train_and_fail(arguments: dict[str, Any], spoil: Spoil, journal: Path) -> str:
    """What this rank raises, and what that was raised from."""
    with pytest.raises((OSError, RuntimeError)) as caught:
        train(arguments, spoil.disk, journal, spoil)
    messages, error = [], caught.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


CASES = {
    "full": ({"tp": 2}, fill, r"No space left on device.*\.incomplete/step=3\.ckpt/__\d_0\.distcp"),
    "full, in the background": ({"async_save": True}, fill, r"No space left on device.*\.incomplete/step=[23]\.ckpt/"),
    "read-only": ({}, protect, r"Read-only file system.*\.incomplete"),
    "full, one file": (
        {"save_distributed_checkpoint": False},
        fill,
        r"No space left on device.*\.incomplete/step=3\.ckpt",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", with_long(CASES, "full", "full, in the background", "read-only"))
def test_the_checkpoint_before_is_there(pool2: Pool, tmp_path: Path, disk: Path, case: str) -> None:
    arguments, how, message = CASES[case]
    journal = tmp_path / "journal"
    errors = pool2.run(train_and_fail, arguments, Spoil(how, disk), journal, trainer=True)
    for error in errors:
        assert re.search(message, error, re.DOTALL), error
    mend(disk)
    before = Story.read(journal)
    pool2.run(train, arguments, disk, tmp_path / "after", trainer=True)
    after = Story.read(tmp_path / "after")
    assert after.start is not None
    assert after.start >= before.begun - bool(arguments.get("async_save"))
    assert after.ended
    assert set(before.losses) | set(after.losses) == set(range(STEPS))
    assert not list(disk.glob(".incomplete/*"))


class Wide(Recorder):
    """Has a table that is larger than what ``consolidate`` collects in memory."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.resize_token_embeddings(20_000)


def save_wide(path: Path) -> None:
    """Runs on one rank."""
    trainer = make_trainer({}, max_steps=1)
    trainer.fit(Wide(), batches(1))
    trainer.save_checkpoint(path)


def test_what_a_full_disk_does_not_take_is_named(
    nursery: Nursery, tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "wide.ckpt"
    Pool(nursery, 1).run(save_wide, checkpoint, trainer=True)
    fill(disk)
    for words, file in ((["export"], "export"), (["consolidate"], "one.ckpt")):
        with pytest.raises(SystemExit):
            main([*words, str(checkpoint), str(disk / file)])
        assert re.search(rf"error: {disk / file}.* could not be written.*: ", capsys.readouterr().err)
        assert [path for path in disk.rglob("*") if path.is_file()] == [disk / BALLAST]


def test_files_are_staged_under_wrappers_too() -> None:
    """Unless the user says what to wrap."""
    own = TorchCheckpointIO()
    for io, inner in ((AsyncCheckpointIO(), StagedCheckpointIO), (AsyncCheckpointIO(own), TorchCheckpointIO)):
        strategy = make_trainer({"save_distributed_checkpoint": False}, plugins=io).strategy
        assert strategy.checkpoint_io is io
        assert type(io.checkpoint_io) is inner
    assert type(make_trainer({}).strategy.checkpoint_io) is StagedCheckpointIO
    assert make_trainer({}, plugins=own).strategy.checkpoint_io is own
