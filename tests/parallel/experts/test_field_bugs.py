"""What went wrong elsewhere, one test each; all against one process, with every gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import DP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.experts.test_exact import EIGHT
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

SIZES = {"dp_shard": 4, "ep": 2}
SCHEDULE = Schedule(steps=2, micro_batches=2, clip=0.5)
BOUND = 1e-5


def starved(implementation: str) -> nn.Module:
    """All tokens go to two experts of the first rank; those of other ranks get none."""
    model = tiny_model("deepseek_v3", experts=implementation, **EIGHT)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.fill_(-50.0)[:2] = 50.0
    return model


def starved_errors(implementations: tuple[str, ...], checkpointing: bool) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    config = FSDP2Config(activation_checkpointing=checkpointing)
    return {
        name: compare(lambda name=name: starved(name), SIZES, 4, SCHEDULE, config).largest for name in implementations
    }


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", with_long([False, True], True))
def test_ranks_without_rows_compute_along(checkpointing: bool, pool4: Pool) -> None:
    for found in pool4.run(starved_errors, ("eager", "grouped_mm", "batched_mm"), checkpointing):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


class Pair:
    """One model on one process, and its copy on a mesh."""

    def __init__(self, prepare: Callable[[nn.Module], None] = lambda model: None, **levers: Any) -> None:
        self.mesh = build_mesh(resolve_sizes(4, **SIZES), "cpu")
        self.alone = tiny_model("qwen3_moe", **EIGHT).train()
        prepare(self.alone)
        self.spread = tiny_model("qwen3_moe", **EIGHT).train()
        prepare(self.spread)
        parallelize(self.spread, self.mesh, FSDP2Config(**levers))
        self.rank = axis(self.mesh, DP).get_local_rank()

    def batches(self, lengths: tuple[int, ...] = (9, 9, 9, 9)) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(3, 128, (2, n), generator=generator) for n in lengths]

    def gradient_errors(self) -> Iterator[tuple[str, float]]:
        for name, parameter in self.alone.named_parameters():
            other = self.spread.get_parameter(name).grad
            if parameter.grad is None:
                assert other is None or not other.full_tensor().any(), name  # type: ignore[attr-defined]
                continue
            assert other is not None, name
            difference = (other.full_tensor() - parameter.grad).norm()  # type: ignore[attr-defined]
            yield name, float(difference / parameter.grad.norm().clamp(min=1e-9))

    def run(self) -> tuple[float, str]:
        """Passes forward and back, and tells the worst gradient."""
        ids = self.batches()
        _loss(self.spread, ids[self.rank]).backward()
        for x in ids:
            (_loss(self.alone, x) / len(ids)).backward()
        return self.worst

    @property
    def worst(self) -> tuple[float, str]:
        return max((error, name) for name, error in self.gradient_errors())


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def twice_through_one_graph() -> tuple[float, str]:
    pair = Pair(activation_checkpointing=True)
    ids = pair.batches()
    loss = _loss(pair.spread, ids[pair.rank])
    loss.backward(retain_graph=True)
    loss.backward()
    for x in ids:
        (_loss(pair.alone, x) / 2).backward()
    return pair.worst


def tokens_of_different_lengths() -> tuple[float, str]:
    pair = Pair()
    ids = pair.batches((1, 17, 4, 9))
    for _ in range(2):
        _loss(pair.spread, ids[pair.rank]).backward()
        for x in ids:
            (_loss(pair.alone, x) / 4).backward()
    return pair.worst


def evaluation_between_micro_batches() -> tuple[float, str]:
    pair = Pair()
    ids = pair.batches()
    for i in range(2):
        _loss(pair.spread, ids[pair.rank]).backward()
        for x in ids:
            (_loss(pair.alone, x) / 4).backward()
        if i == 0:
            pair.spread.eval()
            with torch.no_grad():
                one, other = _loss(pair.spread, ids[pair.rank]), _loss(pair.alone.eval(), ids[pair.rank])
            assert abs(one - other) < 1e-5
            pair.spread.train(), pair.alone.train()
    return pair.worst


def frozen(names: str) -> tuple[float, str]:
    """Experts frozen and all else trained, or the reverse."""

    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((".experts." in name) != (names == "experts"))

    return Pair(freeze).run()


def stock_tools() -> tuple[float, str]:
    """torch's own clipping, fused and foreach AdamW, three steps; all parameters lie on one mesh."""
    worst = (0.0, "")
    for fused in (True, False):
        pair = Pair()
        ids = pair.batches()
        make = lambda model, fused=fused: torch.optim.AdamW(  # noqa: E731
            model.parameters(), lr=1e-3, eps=1e-3, fused=fused, foreach=not fused
        )
        optimizers = [make(model) for model in (pair.spread, pair.alone)]
        for _ in range(3):
            _loss(pair.spread, ids[pair.rank]).backward()
            for x in ids:
                (_loss(pair.alone, x) / 4).backward()
            for model, optimizer in zip((pair.spread, pair.alone), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in pair.alone.named_parameters():
            difference = (pair.spread.get_parameter(name).full_tensor() - parameter).norm() / parameter.norm()  # type: ignore[attr-defined]
            worst = max(worst, (float(difference), name))
    return worst


def generation_of_different_lengths() -> tuple[float, str]:
    """Prompts of different lengths; all ranks write as many tokens, as FSDP2 wants it."""
    pair = Pair()
    prompt = pair.batches((2, 7, 5, 3))[pair.rank]
    arguments: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    one, other = (m.eval().generate(prompt, **arguments) for m in (pair.spread, pair.alone))
    return float((one != other).sum()), "tokens"


def all_cases(names: list[str]) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    return {name: CASES[name]() for name in names}


CASES: dict[str, Callable[[], tuple[float, str]]] = {
    "twice through one graph": twice_through_one_graph,
    "tokens of different lengths": tokens_of_different_lengths,
    "evaluation between micro-batches": evaluation_between_micro_batches,
    "experts frozen": lambda: frozen("experts"),
    "only experts train": lambda: frozen("others"),
    "stock clipping and optimizers": stock_tools,
    "generation": generation_of_different_lengths,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [list(CASES)[:3], pytest.param(list(CASES)[3:], marks=pytest.mark.long)], ids=["passes", "settings"]
)
def test_case(names: list[str], pool4: Pool) -> None:
    for found in pool4.run(all_cases, names):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def with_jitter() -> tuple[float, str]:
    """Runs on each rank: noise before routers, and recomputed routes."""
    changes = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}
    config = FSDP2Config(activation_checkpointing=True)
    return compare(lambda: tiny_model("phimoe", **EIGHT, **changes), SIZES, 4, SCHEDULE, config).largest


@pytest.mark.slow
def test_recomputed_routes_are_those_of_the_forward_pass(pool4: Pool) -> None:
    for error in pool4.run(with_jitter):
        assert error[0] < BOUND, error
