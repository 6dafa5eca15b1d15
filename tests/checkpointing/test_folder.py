"""The checkpoint folder is there completely or not at all, and reading it runs no code."""

import json
import os
import pickle
import re
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.filesystem import _SerialCpuLoader

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.checkpointing.files import folder as module
from lightning_automodel.checkpointing.files import staging
from lightning_automodel.checkpointing.files.background import BackgroundSaver
from lightning_automodel.checkpointing.files.dcp import Held, list_tensors
from lightning_automodel.checkpointing.files.folder import contents_of, save_folder
from lightning_automodel.checkpointing.files.integrity import verify
from lightning_automodel.checkpointing.files.reading import read_checkpoint, refuse_part
from lightning_automodel.checkpointing.files.staging import Staging, remove_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.strategies.checkpoints.hooks import load
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.marks import with_long
from tests.support.training import Recorder, batches, make_trainer, world_size


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
        owner = next(owner for owner in (Staging, staging, module) if hasattr(owner, name))
        setattr(owner, name, die if kind == "kill" else fail)
    save_folder(contents_of(example(value)), Location.of(path))


def die(*args: Any, **kwargs: Any) -> None:
    os._exit(1)


def fail(*args: Any, **kwargs: Any) -> None:
    if dist.get_rank() == 0:
        raise OSError("disk full")


def value_of(path: Path) -> float:
    verify(Location.of(path))
    found = read_checkpoint(Location.of(path))
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
    for sabotage in ("kill write_tensors", "kill _complete", "kill publish", "fail write_tensors", "fail begin"):
        with pytest.raises(RankFailed):
            pool2.run(save, path, 2.0, sabotage)
        assert value_of(path) == 1.0
        assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".ckpt")] == ["last.ckpt"]
    pool2.run(save, path, 2.0, "kill _set_aside")  # is not called: both names change in one step
    assert value_of(path) == 2.0
    pool2.run(save, path, 3.0)
    assert value_of(path) == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    remove_checkpoint(Location.of(path))
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_rank_0_reaches_all_ranks(pool2: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        pool2.run(save, tmp_path / "x.ckpt", 1.0, "fail _complete", timeout=20, grace=20)
    assert caught.value.failures.keys() == {0, 1}
    assert "disk full" in caught.value.failures[1]


def test_what_is_no_checkpoint(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save, tmp_path / "x.ckpt", 1.0)
    with pytest.raises(ValueError, match=r"it has no meta\.pt.*; it holds checkpoints, give one of them: x\.ckpt"):
        read_checkpoint(Location.of(tmp_path))
    refuse_part(Location.of(tmp_path / "x.ckpt"))
    for name in ("meta.pt", "__0_0.distcp"):
        with pytest.raises(ValueError, match=rf"{name} is a part of the checkpoint .*x\.ckpt; give the folder"):
            refuse_part(Location.of(tmp_path / "x.ckpt" / name))
    (tmp_path / "x.ckpt" / "meta.pt").unlink()
    with pytest.raises(ValueError, match=r"it has no meta\.pt"):
        read_checkpoint(Location.of(tmp_path / "x.ckpt"))
    for file, kind in (("config.json", "an exported model"), ("adapter_config.json", "an exported adapter")):
        (tmp_path / "x.ckpt" / file).write_text("{}")
        with pytest.raises(ValueError, match=rf"it has no meta\.pt.*; it is {kind}"):
            read_checkpoint(Location.of(tmp_path / "x.ckpt"))
    with pytest.raises(FileNotFoundError, match=r"^Checkpoint file not found: there is no checkpoint at"):
        read_checkpoint(Location.of(tmp_path / "y.ckpt"))


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
        read_checkpoint(Location.of(path), weights_only=False)
    assert (path / "meta.pt").exists()


# ---- damage ----------------------------------------------------------------------------------------------------------


def truncate(folder: Path) -> str:
    part = next(folder.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-7])
    return f"{part.name} is damaged: it has"


def flip_a_bit(folder: Path) -> str:
    part = next(folder.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)
    return f"{part.name} is damaged: its checksum"


def lose(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return ".metadata is missing"


def swap(folder: Path) -> str:
    one, other = sorted(folder.glob("*.distcp"))
    other.rename(folder / "aside")
    one.rename(other)
    (folder / "aside").rename(one)
    return ".distcp is damaged"


def cut_the_sums(folder: Path) -> str:
    sums = folder / "checksums.json"
    sums.write_bytes(sums.read_bytes()[:-3])
    return "checksums.json is damaged"


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="use another checkpoint") as caught:
        verify(Location.of(path))
    return str(caught.value)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose, swap, cut_the_sums])
def test_a_damaged_folder_is_refused_on_every_rank(pool2: Pool, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    path = tmp_path / "x.ckpt"
    pool2.run(save, path, 1.0)
    assert len(list(path.glob("*.distcp"))) == 2
    sums = json.loads((path / "checksums.json").read_bytes())
    assert {name: zlib.crc32((path / name).read_bytes()) for name in sums} == {n: s["crc32"] for n, s in sums.items()}
    expected = damage(path)
    for message in pool2.run(refusal, path):
        assert expected in message


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"w": torch.arange(1000.0)}}, path)
    verify(Location.of(path))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "x.ckpt is damaged" in refusal(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    assert "the checksum of its entry x/data/0 is wrong" in refusal(path)


def test_the_refusal_names_the_checkpoint_before(tmp_path: Path) -> None:
    """Not the damaged one itself by its other name, and nothing that is not complete, or damaged as well."""
    for step in (1, 2, 3):
        torch.save({"state_dict": {"w": torch.arange(1000.0)}}, tmp_path / f"step={step}.ckpt")
        os.utime(tmp_path / f"step={step}.ckpt", (step, step))
    (tmp_path / "step=4.ckpt").mkdir()
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    trainer = make_trainer({})
    for step, expected in (
        (3, rf"; the newest one beside it that is not damaged is {tmp_path}/step=2\.ckpt$"),
        (2, "step=1"),
        (1, "other checkpoint$"),
    ):
        path = tmp_path / f"step={step}.ckpt"
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(ValueError, match=expected):
            load(Location.of(tmp_path / "last.ckpt"), None, trainer)


def go_on_from_last(directory: Path, damage: str, skip: bool) -> dict[str, Any]:
    """Three epochs in ``directory``, the newest of which is damaged in the middle of that file, then ``"last"``."""
    config = FSDP2Config(skip_damaged_checkpoints=skip)

    def run(epochs: int, path: str | None) -> tuple[int, list[str]]:
        saver = ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_last="link")
        strategy = FSDP2TPStrategy(config=config)
        one = make_trainer(strategy, callbacks=[saver], max_epochs=epochs, enable_checkpointing=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.fit(module := Recorder(), batches(world_size()), ckpt_path=path)
        return len(module.losses), [str(warning.message) for warning in caught]

    run(3, None)
    dist.barrier()
    if dist.get_rank() == 0:
        file = directory / "epoch=2.ckpt" / damage
        file.write_bytes(file.read_bytes()[:-3])
    dist.barrier()
    try:
        steps, messages = run(4, "last")
    except ValueError as error:
        return {"error": str(error)}
    return {"steps": steps, "messages": [message for message in messages if "is damaged" in message]}


@pytest.mark.slow
@pytest.mark.parametrize("damage", with_long(["__0_0.distcp", ".metadata"], ".metadata"))
def test_last_passes_over_a_damaged_checkpoint(pool2: Pool, tmp_path: Path, damage: str) -> None:
    first, second = pool2.run(go_on_from_last, tmp_path, damage, True, trainer=True)
    assert first["steps"] == second["steps"] == 8  # of 4 in an epoch
    [message] = first["messages"]
    assert re.search(rf"epoch=2\.ckpt/{re.escape(damage)} is damaged: .* goes on from .*epoch=1\.ckpt", message)


def test_last_is_an_error_where_it_may_not_pass_over(pool2: Pool, tmp_path: Path) -> None:
    for found in pool2.run(go_on_from_last, tmp_path, "__0_0.distcp", False, trainer=True):
        assert "is damaged" in found["error"]
        assert "epoch=1.ckpt" in found["error"]


# ---- in the background -----------------------------------------------------------------------------------------------


def save_in_background(directory: Path) -> dict[str, Any]:
    """Two saves of one tensor that changes at once, the removal of the first, and a save that fails."""
    saver, state = BackgroundSaver(), example(1.0)
    first, second, third = (Location.of(directory / name) for name in ("1.ckpt", "2.ckpt", "2.ckpt/meta.pt/3.ckpt"))
    saver.save(contents_of(state), first)
    state["state_dict"]["w"].zero_()
    saver.wait()
    state = example(2.0)
    saver.save(contents_of(state), second)
    saver.afterwards(lambda: remove_checkpoint(first) if dist.get_rank() == 0 else None)
    state["state_dict"]["w"].zero_()
    saver.wait()
    values = [value_of(directory / "2.ckpt"), (directory / "1.ckpt").exists()]
    saver.save(contents_of(state), third)
    saver.afterwards(lambda: remove_checkpoint(second))
    with pytest.raises(RuntimeError, match=r"3\.ckpt could not be written in the background") as caught:
        saver.close()
    saver.close()
    return {"values": values, "error": str(caught.value)}


def test_background_saves(pool2: Pool, tmp_path: Path) -> None:
    for result in pool2.run(save_in_background, tmp_path):
        assert result["values"] == [2.0, False]
        assert "Not a directory" in result["error"]
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".ckpt")] == ["2.ckpt"]
    assert value_of(tmp_path / "2.ckpt") == 2.0


class Late(dict):
    """States of an optimizer that are not copied before ``release``."""

    release: threading.Event

    def items(self) -> Any:
        self.release.wait()
        return super().items()


def change_before_the_copy(directory: Path, with_step: bool) -> dict[str, Any]:
    """Runs on each rank: states change before their copy, in a step of the optimizer or without."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(3)
    optimizer.step()
    moment = optimizer.state[parameter]["momentum_buffer"]
    saver, states = BackgroundSaver(), Late(w=Held.of(moment, "w"))
    states.release = threading.Event()
    path = Location.of(directory / "new" / "1.ckpt")
    saver.save(replace(contents_of({"state_dict": {}}), tensors={"optimizer_0": states}), path)
    assert path.parent.exists()  # a link to the checkpoint may be put there now
    if not with_step:
        moment.zero_()
    threading.Timer(0.2, states.release.set).start()
    optimizer.step()
    was_copied = states.release.is_set()
    try:
        saver.close()
    except RuntimeError as error:
        return {"error": str(error), "was_copied": was_copied}
    [stored] = list_tensors(path, weights_only=True)["optimizer_0"].values()
    return {"moment": moment.tolist(), "stored": stored.load().tolist(), "was_copied": was_copied}


def test_a_step_waits_for_the_copy_of_what_it_changes(pool2: Pool, tmp_path: Path) -> None:
    expected = {"moment": [1.5] * 3, "stored": [1.0] * 3, "was_copied": True}
    assert pool2.run(change_before_the_copy, tmp_path, with_step=True) == [expected] * 2


def test_states_that_change_before_their_copy(pool2: Pool, tmp_path: Path) -> None:
    for found in pool2.run(change_before_the_copy, tmp_path, with_step=False):
        assert "states of an optimizer changed outside of its step()" in found["error"]
        assert found["was_copied"]


def save_beside_device(directory: Path) -> tuple[list[tuple[str, int]], int]:
    """Runs on each rank, where CUDA says that device 3 is in use: who chose one, and how often one was waited for."""
    chosen: list[tuple[str, int]] = []
    waits: list[str] = []
    calls: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 3,
        "set_device": lambda index: chosen.append((threading.current_thread().name, index)),
        "synchronize": lambda: waits.append(threading.current_thread().name),
    }
    saver, tensors = BackgroundSaver(), {"optimizer_0": {"w": Held.of(torch.ones(3), "w")}}
    contents = replace(contents_of({"state_dict": {"w": torch.ones(3)}}), tensors=tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_filesystem, "_OverlappingCpuLoader", lambda resolve, **_: _SerialCpuLoader(resolve))
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        saver.save(contents, Location.of(directory / "1.ckpt"))
        saver.close()
    return chosen, len(waits)


def test_the_thread_of_a_save_is_on_the_device_of_its_rank(pool2: Pool, tmp_path: Path) -> None:
    """A thread begins on device 0, where each rank would make a context; what lies on the host waits for no device."""
    assert pool2.run(save_beside_device, tmp_path) == [([("checkpoint", 3)], 0)] * 2
