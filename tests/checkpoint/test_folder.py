"""The checkpoint folder is there completely or not at all, and reading it runs no code."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.checkpointing import folder as module
from lightning_automodel.checkpointing.folder import read_checkpoint, remove_checkpoint, save_folder
from tests.harness.pool import Pool, RankFailed


def example(value: float) -> dict[str, Any]:
    tensor = torch.full((2, 3), value)
    state = {
        "state": {"w": {"step": torch.tensor(value), "moment": tensor + 1, "count": 7}},
        "param_groups": [{"lr": 1}],
    }
    return {"state_dict": {"w": tensor, "tied": tensor, "extra": "text"}, "optimizer_states": [state], "epoch": value}


def save(path: Path, value: float, sabotage: str | None = None) -> None:
    """Saves an example; with ``sabotage`` a function of the module kills the process, or fails, when it is called."""
    if sabotage is not None:
        kind, name = sabotage.split()
        setattr(module, name, die if kind == "kill" else fail)
    save_folder(example(value), path)


def die(*args: Any) -> None:
    os._exit(1)


def fail(*args: Any) -> None:
    if dist.get_rank() == 0:
        raise OSError("disk full")


def value_of(path: Path) -> float:
    found = read_checkpoint(path)
    assert found["state_dict"]["tied"] is found["state_dict"]["w"]
    assert found["state_dict"]["extra"] == "text"
    state = found["optimizer_states"][0]
    assert state["param_groups"] == [{"lr": 1}]
    assert state["state"]["w"]["count"] == 7
    value = float(state["state"]["w"]["step"].load())
    assert torch.equal(found["state_dict"]["w"].load(), torch.full((2, 3), value))
    assert torch.equal(state["state"]["w"]["moment"].load(), torch.full((2, 3), value + 1))
    assert found["epoch"] == value
    return value


def test_a_save_that_does_not_end_leaves_the_previous_one(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    pool2.run(save, path, 1.0)
    for sabotage in ("kill write_tensors", "kill _complete", "fail write_tensors", "fail _make_empty"):
        with pytest.raises(RankFailed):
            pool2.run(save, path, 2.0, sabotage)
        assert value_of(path) == 1.0
        assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".ckpt")] == ["last.ckpt"]
    pool2.run(save, path, 3.0)
    assert value_of(path) == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_rank_0_reaches_all_ranks(pool2: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        pool2.run(save, tmp_path / "x.ckpt", 1.0, "fail _complete", timeout=20)
    assert caught.value.failures.keys() == {0, 1}
    assert "disk full" in caught.value.failures[1]


def test_what_is_no_checkpoint(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save, tmp_path / "x.ckpt", 1.0)
    (tmp_path / "x.ckpt" / "meta.pt").unlink()
    with pytest.raises(ValueError, match=r"it has no meta\.pt"):
        read_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        read_checkpoint(tmp_path / "y.ckpt")


class Calls:
    """Unpickles to a call."""

    def __init__(self, function: Callable, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_the_table_runs_no_code(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    pool2.run(save, path, 1.0)
    (path / ".metadata").write_bytes(pickle.dumps(Calls(shutil.rmtree, str(path))))
    with pytest.raises(ValueError, match=r"names shutil\.rmtree"):
        read_checkpoint(path, weights_only=False)
    assert (path / "meta.pt").exists()
