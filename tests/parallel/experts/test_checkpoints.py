"""Checkpoints, exports and stored shards under expert parallelism: the files of one size of ep are those of all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import (
    VOCABULARY,
    Recorder,
    SaveAfter,
    batches,
    largest_difference,
    make_trainer,
    rows,
    whole,
    whole_parameters,
    world_size,
)

EPS = (1, 2, 4)


def tiny_experts() -> Qwen3MoeForCausalLM:
    """Eight experts, two for each token; the same weights in every process."""
    config = Qwen3MoeConfig(
        hidden_size=24,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config)


class Experts(Recorder):
    """Reads its model from a folder, if it is given one."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_experts() if self.folder is None else AutoModelForCausalLM.from_pretrained(self.folder)

    def on_fit_end(self) -> None:
        if self.folder is not None:
            self.model.save_pretrained(self.folder / "export")


def run(
    sizes: dict[str, int] | None, save: Path | None, resume: Path | None, folder: Path | None = None, at: int = 4
) -> dict[str, Any]:
    """Trains two epochs of four batches in optimizer steps of two, saving after ``at`` batches."""
    module = Experts(folder)
    callbacks = [SaveAfter(save, at)] if save else []
    strategy = "auto" if sizes is None else FSDP2TPStrategy(**sizes)  # type: ignore[arg-type]
    trainer = make_trainer(
        strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=callbacks
    )
    trainer.fit(module, batches(world_size(), shuffle=False), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module), "optimizer": states(module)}


def states(module: Experts) -> dict[tuple[str, str], torch.Tensor]:
    """Copies of what the optimizer keeps of each parameter."""
    (optimizer,), names = module.trainer.optimizers, {p: name for name, p in module.named_parameters()}
    kept = {(names[p], key): value for p, state in optimizer.state.items() for key, value in state.items()}
    return {place: whole(value) for place, value in kept.items() if isinstance(value, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "at"),
    with_long([(1, 2, 4), (2, 4, 5), (4, 1, 5)], (1, 2, 4), (2, 4, 5)),
    ids=["1 to 2", "2 to 4", "4 to 1"],
)
def test_runs_of_every_ep_go_on_from_one_another(
    nursery: Nursery, pool4: Pool, tmp_path: Path, source: int, target: int, at: int
) -> None:
    """After the second optimizer step (4), and between the micro-batches of the third (5)."""
    expected = Pool(nursery, 1).run(run, None, None, None, trainer=True)[0]
    first = pool4.run(run, {"ep": source}, tmp_path / "a.ckpt", None, None, at, trainer=True)[0]
    again = pool4.run(run, {"ep": target}, None, tmp_path / "a.ckpt", trainer=True)[0]
    assert first["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert again["losses"] == pytest.approx(expected["losses"][at:], abs=1e-5)
    assert largest_difference(first, expected) < 1e-4
    assert largest_difference(again, expected) < 1e-4


@pytest.mark.slow
def test_what_one_ep_saves_another_reads_bit_by_bit(pool4: Pool, tmp_path: Path) -> None:
    saved = pool4.run(run, {"ep": 4}, tmp_path / "a.ckpt", None, None, 8, trainer=True)[0]
    read = pool4.run(run, {"ep": 1}, None, tmp_path / "a.ckpt", trainer=True)[0]
    assert read["losses"] == []  # the last batch was through
    assert ("model.model.layers.0.mlp.experts.gate_up_proj", "exp_avg") in saved["optimizer"]
    for what in ("parameters", "optimizer"):
        assert read[what].keys() == saved[what].keys()
        for name, value in saved[what].items():
            assert torch.equal(read[what][name], value), name


def validated(sizes: dict[str, int] | None) -> dict[str, float]:
    """Runs on each rank: five batches of one row, which four ranks cannot share evenly, before and in training."""
    module, loader = Experts(), DataLoader(TensorDataset(rows(5)), batch_size=1)
    trainer = make_trainer("auto" if sizes is None else FSDP2TPStrategy(**sizes), max_epochs=1)
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit(module, batches(world_size(), shuffle=False), loader)
    return {"before": before, "after": float(trainer.callback_metrics["val_loss"])}


@pytest.mark.slow
def test_validation_with_uneven_batches(nursery: Nursery, pool4: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(validated, None, trainer=True)
    assert expected["after"] != pytest.approx(expected["before"], rel=1e-2)
    for found in pool4.run(validated, {"ep": 2}, trainer=True, timeout=60):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_goes_on_alone(nursery: Nursery, pool4: Pool, tmp_path: Path) -> None:
    path = tmp_path / "ep.ckpt"
    saved = pool4.run(run, {"ep": 2}, path, None, trainer=True)[0]
    alone = Pool(nursery, 1).run(run, {}, None, path, trainer=True)[0]
    assert largest_difference(alone, saved) < 2e-5


@pytest.mark.slow
def test_files_are_read_and_written_as_by_one_process(nursery: Nursery, pool4: Pool, tmp_path: Path) -> None:
    tiny_experts().save_pretrained(tmp_path)
    expected = Pool(nursery, 1).run(run, None, None, None, trainer=True)[0]
    found = pool4.run(run, {"ep": 2}, None, None, tmp_path, trainer=True)[0]
    assert largest_difference(found, expected) < 2e-5
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, value in found["parameters"].items():
        assert torch.equal(written[name.removeprefix("model.")], value), name


def shards(sizes: dict[str, int]) -> list[dict[str, tuple[Any, ...]]]:
    """Runs on each rank: what it stores of each parameter, for each ``ep``."""
    found = []
    for ep in EPS if "tp" not in sizes else (1, 2):
        mesh = build_mesh(resolve_sizes(4, ep=ep, **sizes), "cpu")
        model = parallelize(tiny_model("gpt_oss", num_local_experts=8), mesh)
        parameters = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        found.append({n: (p.to_local().clone(), p.placements, p.shape, p.stride()) for n, p in parameters.items()})
        assert len({str(p.device_mesh) for p in parameters.values()}) == 1
    return found


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}])
def test_every_rank_stores_what_it_stores_without_ep(sizes: dict[str, int], pool4: Pool) -> None:
    for without, *others in pool4.run(shards, sizes):
        for found in others:
            assert found.keys() == without.keys()
            for name, (local, *label) in without.items():
                assert torch.equal(found[name][0], local), name
                assert list(found[name][1:]) == label, name
