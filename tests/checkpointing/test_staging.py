"""Where a checkpoint is written before it has its name: what other runs do there meanwhile."""

import os
import time
from pathlib import Path

import pytest

from lightning_automodel.checkpointing.files import staging
from lightning_automodel.checkpointing.files.staging import Staging
from lightning_automodel.checkpointing.files.storage import Location


def test_two_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two checkpoints of one name were mixed: the second run took the folder that the first one wrote into."""
    monkeypatch.setattr(staging, "_PATIENCE", 0.2)
    one, same, other = (Staging(Location.of(tmp_path / name)) for name in ("1.ckpt", "1.ckpt", "2.ckpt"))
    one.begin()
    (one.folder / "part").write(b"one")
    with pytest.raises(
        ValueError, match=r"1\.ckpt is being written by another process; .* \(dirpath of ModelCheckpoint"
    ):
        same.begin()
    other.begin()
    other.publish(last="meta.pt")
    if os.fork() == 0:  # a worker of a data loader, which has what is open
        time.sleep(1)
        os._exit(0)
    one.publish(last="meta.pt")
    assert (tmp_path / "1.ckpt" / "part").read_bytes() == b"one"
    same.begin()
    same.publish(last="meta.pt")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["1.ckpt", "2.ckpt"]


def _save_often(folder: Path, run: int) -> None:
    for count in range(100):
        staging = Staging(Location.of(folder / f"{run}-{count % 2}.ckpt"))
        staging.begin()
        (staging.folder / "part").write(b"part")
        staging.publish(last="part")


def test_runs_that_begin_and_end_at_the_same_time(tmp_path: Path) -> None:
    """A folder that was made and not locked yet was deleted by another run, for a leftover."""
    children = []
    for run in range(3):
        children.append(child := os.fork())
        if child == 0:
            try:
                _save_often(tmp_path, run)
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i}-{j}.ckpt" for i in range(3) for j in range(2)]
