"""Where a checkpoint is written before it has its name: what other runs do there meanwhile."""

import os
import time
from pathlib import Path

import pytest

from lightning_automodel.checkpointing import staging
from lightning_automodel.checkpointing.staging import Staging
from lightning_automodel.checkpointing.storage import Location


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
