"""A run that is stopped and resumed, in the same layout or another, is the run that was not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_automodel import DDPStrategy as DDPStrategyOfOurs
from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.testing.pool import Nursery, Pool
from tests.checkpointing.test_states import Counting
from tests.strategies.users.test_habits_of_steps import Unfrozen
from tests.support.marks import with_long
from tests.support.training import GLOBAL_BATCH, Recorder, SaveAfter, batches, fit, make_trainer, whole_parameters

STEPS_PER_EPOCH = 4


def train(sizes: dict[str, Any], directory: Path | str, epochs: int, **arguments: Any) -> dict[str, Any]:
    module, parameters = fit(sizes, directory, epochs=epochs, **arguments)
    return {"losses": module.losses, "draws": module.draws, "parameters": parameters}


def furthest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.slow
def test_the_same_layout_is_bitwise_the_same(pool2: Pool, tmp_path: Path) -> None:
    """The first run saves in the background."""
    whole = pool2.run(train, {"tp": 2, "async_save": True}, tmp_path / "a", 3, trainer=True)
    again = pool2.run(train, {"tp": 2}, tmp_path / "b", 3, resume=tmp_path / "a/epoch=1.ckpt", trainer=True)
    for rank in range(2):
        assert again[rank]["losses"] == whole[rank]["losses"][2 * STEPS_PER_EPOCH :]
        assert again[rank]["draws"] == whole[rank]["draws"][2 * STEPS_PER_EPOCH :]
        assert furthest(again[rank]["parameters"], whole[rank]["parameters"]) == 0


@pytest.mark.slow
def test_across_layouts_and_kinds(nursery: Nursery, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """tp=2 -> dp=2 -> one process -> dp=2 x tp=2 and dp_replicate=2 x tp=2; the second writes a plain file. The tied
    vocabulary is odd.
    """
    whole = pool2.run(train, {"tp": 2}, tmp_path / "a", 4, trainer=True)[0]
    file = {"save_distributed_checkpoint": False}
    by_data = pool2.run(train, file, tmp_path / "b", 2, resume=tmp_path / "a/epoch=0.ckpt", trainer=True)[0]
    one = Pool(nursery, 1).run(train, {}, tmp_path / "c", 3, resume=tmp_path / "b/epoch=1.ckpt", trainer=True)[0]
    for sizes in ({"tp": 2}, {"tp": 2, "dp_replicate": 2}):
        folder = tmp_path / f"d{len(sizes)}"
        four = pool4.run(train, sizes, folder, 4, resume=tmp_path / "c/epoch=2.ckpt", trainer=True)[0]
        losses = [*by_data["losses"], *one["losses"], *four["losses"]]
        assert losses == pytest.approx(whole["losses"][STEPS_PER_EPOCH:], abs=1e-6)
        assert furthest(four["parameters"], whole["parameters"]) < 1e-5
        assert furthest(stored_tensors(folder), stored_tensors(tmp_path / "a")) < 1e-5
    assert by_data["draws"] == whole["draws"][STEPS_PER_EPOCH : 2 * STEPS_PER_EPOCH]
    module = Recorder.load_from_checkpoint(tmp_path / "b/epoch=1.ckpt")
    saved = torch.load(tmp_path / "b/epoch=1.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(parameter, saved[name]) for name, parameter in module.named_parameters())


def train_by_url(distributed: bool) -> tuple[list[float], list[float], list[str]]:
    arguments = {"save_distributed_checkpoint": distributed}
    folder = f"memory://checkpoints-{distributed}"
    whole = train(arguments, folder, 2)["losses"]
    again = train(arguments, "memory://others", 2, resume=f"{folder}/epoch=0.ckpt")["losses"]
    return whole[STEPS_PER_EPOCH:], again, Location.of(folder).names()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_url_in_place_of_a_path(nursery: Nursery, distributed: bool) -> None:
    [(whole, again, names)] = Pool(nursery, 1).run(train_by_url, distributed, trainer=True)
    assert again == whole
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt"]


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter and optimizer state of the last checkpoint in ``folder``, as it was written."""
    found = read_checkpoint(Location.of(folder / "epoch=3.ckpt"))
    moments = {
        f"{name}.{key}": value.load()
        for name, state in found["optimizer_states"][0]["state"].items()
        for key, value in state.items()
    }
    return {**{name: value.load() for name, value in found["state_dict"].items()}, **moments}


# ---- layers that a callback has thawed -------------------------------------------------------------------------------


def train_thawing(sizes: dict[str, Any], directory: Path, resume: Path | None = None) -> dict[str, Any]:
    """Runs on each rank: one block more trains in each epoch."""
    return train(sizes, directory, 3, module=Unfrozen(), resume=resume)


@pytest.mark.slow
def test_what_was_thawed_trains_on(pool2: Pool, tmp_path: Path) -> None:
    whole = pool2.run(train_thawing, {"tp": 2}, tmp_path / "a", trainer=True)[0]
    for sizes in ({}, {"tp": 2, "save_distributed_checkpoint": False}):
        for resume in (tmp_path / "a/epoch=0.ckpt", tmp_path / "a/epoch=1.ckpt"):
            folder = tmp_path / f"b{len(sizes)}{resume.stem}"
            again = pool2.run(train_thawing, sizes, folder, resume, trainer=True)[0]
            assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], abs=1e-6)
            assert furthest(again["parameters"], whole["parameters"]) < 1e-5


# ---- checkpoints of other strategies ---------------------------------------------------------------------------------


class Sharded(Recorder):
    """What a user of Lightning's own strategy writes."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            for block in self.model.model.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def train_elsewhere(name: str, directory: Path) -> dict[str, Any]:
    strategy = DDPStrategy() if name == "ddp" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = Recorder(tied=False) if name == "ddp" else Sharded(tied=False)
    saver = ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    run = make_trainer(strategy, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    run.fit(module, batches(2, shuffle=True))
    return {"losses": module.losses, "parameters": whole_parameters(module)}


def resume_here(path: Path, directory: Path) -> dict[str, Any]:
    module = Recorder(tied=False)
    arguments: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    return train({"tp": 2}, directory, 2, module=module, resume=path, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "model parallel"])
def test_resume_from_lightnings_own_strategies(pool2: Pool, tmp_path: Path, name: str) -> None:
    """A plain file with numbered optimizer states, and a folder with named ones."""
    there = pool2.run(train_elsewhere, name, tmp_path / "there", trainer=True)[0]
    here = pool2.run(resume_here, tmp_path / "there/epoch=0.ckpt", tmp_path / "here", trainer=True)[0]
    assert here["losses"] == pytest.approx(there["losses"][STEPS_PER_EPOCH:], abs=1e-6)
    assert furthest(here["parameters"], there["parameters"]) < 1e-5


class OwnSharded(Sharded):
    """In steps of all rows, whose order Lightning's strategy draws."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OwnWhole(Recorder):
    """The same for ours."""

    configure_optimizers = OwnSharded.configure_optimizers


def resume_there(path: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: steps 1 to 6, saving behind the third, or from there on with Lightning's strategy."""
    module, strategy = (OwnSharded(), ModelParallelStrategy(2, 1)) if resume else (OwnWhole(), FSDP2TPStrategy())
    run = make_trainer(strategy, max_epochs=6, callbacks=[SaveAfter(path, 3)] if path else [])
    run.fit(module, batches(2, GLOBAL_BATCH), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module)}


def test_lightnings_own_strategy_and_torchs_tools_read_a_folder(pool2: Pool, tmp_path: Path) -> None:
    """A tied weight by each of its names, and the hyperparameters beside the optimizer's states."""
    path = tmp_path / "here.ckpt"
    here = pool2.run(resume_there, path, None, trainer=True)[0]
    there = pool2.run(resume_there, None, path, trainer=True)[0]
    assert there["losses"] == pytest.approx(here["losses"][3:], abs=1e-6)
    assert furthest(there["parameters"], here["parameters"]) < 1e-5
    module = OwnWhole()
    module.configure_model()
    optimizer = module.configure_optimizers()
    state = {"state_dict": get_model_state_dict(module), "optimizer_0": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    stored = read_checkpoint(Location.of(path))
    assert state["state_dict"].keys() == whole["state_dict"].keys() == stored["state_dict"].keys()
    for name, value in stored["state_dict"].items():
        torch.testing.assert_close([state["state_dict"][name], whole["state_dict"][name]], [value.load()] * 2)
    groups = stored["optimizer_states"][0]["param_groups"]
    assert state["optimizer_0"]["param_groups"] == whole["optimizer_0"]["param_groups"] == groups


class Quasi(Recorder):
    """With states in lists, and of other shapes than the parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2, history_size=3)


class Counted(Recorder):
    """With a state for all parameters together."""

    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", with_long([Quasi, Counted], Quasi))
def test_states_of_other_forms_go_to_other_layouts(nursery: Nursery, tmp_path: Path, kind: type[Recorder]) -> None:
    one = Pool(nursery, 1)
    settings: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    for distributed in (True, False):
        ours, folder = {"save_distributed_checkpoint": distributed}, tmp_path / str(distributed)
        whole = one.run(train, ours, folder, 2, module=kind(), trainer=True, **settings)[0]
        again = one.run(resume_replicated, kind, folder, settings, trainer=True)[0]
        assert again["losses"] == pytest.approx(whole["losses"][len(whole["losses"]) // 2 :], abs=1e-5)
        assert furthest(again["parameters"], whole["parameters"]) < 1e-5


def resume_replicated(kind: type[Recorder], folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    module = kind()
    run = make_trainer(DDPStrategyOfOurs(), max_epochs=2, **settings)
    run.fit(module, batches(1, shuffle=True), ckpt_path=folder / "epoch=0.ckpt")
    return {"losses": module.losses, "parameters": whole_parameters(module)}
