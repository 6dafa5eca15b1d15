"""Optimizers on shards: the updates of one process, or an error with a way out; the source of a table in the docs."""

import re
from pathlib import Path
from typing import Any

import optimi
import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.strategies.steps.optimizers import check_optimizers, updates_each_element_alone
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import OLD_FSDP2, SHARDS_TAKE_MASKS
from tests.support.training import Recorder, batches, make_trainer, tiny_llama, whole, whole_parameters, world_size

EXACT, REFUSED, NO_OPERATION = "exact", "on other elements of the same tensor", "cannot carry out on sharded parameters"
ROUNDED = "exact up to its bfloat16"

CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{
        f"torch.optim.{name}": (getattr(torch.optim, name), {}, EXACT)
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "Adamax",
            "Adagrad",
            "Adadelta",
            "ASGD",
        )
    },
    "torch.optim.RMSprop": (torch.optim.RMSprop, {"eps": 1e-3}, EXACT),  # else rounding of tiny gradients is magnified
    "torch.optim.SGD(momentum, nesterov)": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, EXACT),
    "torch.optim.Adam(foreach=True)": (torch.optim.Adam, {"foreach": True}, EXACT),
    "torch.optim.AdamW(fused=True)": (torch.optim.AdamW, {"fused": True}, EXACT),
    "torch.optim.SGD(fused=True)": (torch.optim.SGD, {"fused": True}, NO_OPERATION),
    "torch.optim.Adagrad(fused=True)": (torch.optim.Adagrad, {"fused": True}, NO_OPERATION),
    "torch.optim.Rprop": (torch.optim.Rprop, {}, EXACT if SHARDS_TAKE_MASKS else NO_OPERATION),
    "torch.optim.Muon": (torch.optim.Muon, {}, ROUNDED),
    "torch.optim.Adafactor": (torch.optim.Adafactor, {}, REFUSED),
    "torch.optim.LBFGS": (torch.optim.LBFGS, {}, REFUSED),
    "torch.optim.LBFGS(line search)": (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}, REFUSED),
    **{
        f"optimi.{name}": (getattr(optimi, name), {}, EXACT)
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "Adan",
            "Lion",
            "RAdam",
            "Ranger",
        )
    },
    "optimi.StableAdamW": (optimi.StableAdamW, {"triton": False}, EXACT),  # by itself it takes triton on a CPU, too
    "optimi.AdamW(foreach=True)": (optimi.AdamW, {"foreach": True}, NO_OPERATION),
    "torchao.optim.AdamW8bit": (torchao.optim.AdamW8bit, {}, REFUSED),
    "torchao.optim.AdamW4bit": (torchao.optim.AdamW4bit, {}, REFUSED),
    "torchao.optim.AdamWFp8": (torchao.optim.AdamWFp8, {}, REFUSED),
}
QUICK = ["torch.optim.Muon", "torch.optim.Rprop", "torch.optim.Adafactor", "optimi.StableAdamW"]


def make(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    kind, options, outcome = CASES[name]
    return kind([p for p in parameters if outcome != ROUNDED or p.ndim == 2], **{"lr": 1e-2, **options})


class Optimized(Recorder):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return make(self.name, list(self.parameters()))


def run(names: list[str], sizes: dict[str, int]) -> dict[str, dict[str, Tensor] | str]:
    """Runs on each rank: parameters after four steps, or the error."""
    found: dict[str, Any] = {}
    for name in names:
        module = Optimized(name)
        trainer = make_trainer(sizes, max_epochs=1)
        try:
            trainer.fit(module, batches(world_size() // sizes.get("tp", 1)))
            found[name] = whole_parameters(module)
        except ValueError as error:
            found[name] = str(error)
    return found


def outcome_of(name: str, ranks: int) -> str:
    is_refused = OLD_FSDP2 and ranks == 4 and name == "optimi.StableAdamW"
    return NO_OPERATION if is_refused else CASES[name][2]


def check(nursery: Nursery, names: list[str], layouts: list[tuple[int, dict[str, int]]]) -> None:
    start = {f"model.{name}": p.detach() for name, p in tiny_llama().named_parameters()}
    exact = [name for name in names if CASES[name][2] in (EXACT, ROUNDED)]
    expected = Pool(nursery, 1).run(run, exact, {}, trainer=True, timeout=200)[0]
    for ranks, sizes in layouts:
        actual = Pool(nursery, ranks).run(run, names, sizes, trainer=True, timeout=300)[0]
        for name in names:
            found, outcome = actual[name], outcome_of(name, ranks)
            if outcome in (REFUSED, NO_OPERATION):
                assert isinstance(found, str), name
                assert name.split(".")[-1].split("(")[0] in found
                assert outcome in found
                continue
            assert not isinstance(found, str), (name, found)
            bound = 0.05 if outcome == ROUNDED else 1e-3
            for key, value in expected[name].items():
                way = (value - start[key]).norm()
                assert (found[key] - value).norm() <= bound * way + 1e-12, (name, key, sizes)


@pytest.mark.slow
def test_quickly(nursery: Nursery) -> None:
    check(nursery, QUICK, [(4, {"tp": 2})])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_against_one_process(nursery: Nursery) -> None:
    check(nursery, list(CASES), [(2, {"tp": 2}), (2, {}), (4, {"tp": 2})])


@pytest.mark.parametrize("name", list(CASES))
def test_the_rule_finds_what_works_on_whole_matrices(name: str) -> None:
    optimizer = make(name, [nn.Parameter(torch.zeros(4, 8))])
    before = str(optimizer.state)
    is_alone = CASES[name][2] in (EXACT, NO_OPERATION) and name != "optimi.StableAdamW"
    assert updates_each_element_alone(optimizer) is is_alone
    assert str(optimizer.state) == before


def orthogonalize(tp: int) -> int:
    """Runs on each rank: steps of torch's Muon with the same gradients, of shards and of whole matrices.

    Returns:
        how many messages a matrix takes.
    """
    mesh = build_mesh(resolve_sizes(world_size(), tp=tp), "cpu")
    model, alone = parallelize(tiny_llama(), mesh), tiny_llama()
    matrices, whole_ones = ([p for p in m.parameters() if p.ndim == 2] for m in (model, alone))
    optimizers = [torch.optim.Muon(held, lr=0.1) for held in (matrices, whole_ones)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for sharded, whole_one in zip(matrices, whole_ones, strict=True):
            assert isinstance(sharded, DTensor)
            whole_one.grad = torch.randn(whole_one.shape, generator=generator)
            place = sharded.device_mesh, sharded.placements
            sharded.grad = distribute_tensor(whole_one.grad, *place, src_data_rank=None)
        with CommDebugMode() as messages:
            for optimizer in optimizers:
                optimizer.step()
    for sharded, whole_one in zip(matrices, whole_ones, strict=True):
        assert torch.equal(whole(sharded), whole_one)
    return messages.get_total_counts()


@pytest.mark.parametrize(("ranks", "tp", "messages"), [(2, 1, 15), (2, 2, 15), (4, 2, 30)])
def test_muon_orthogonalizes_whole_matrices(ranks: int, tp: int, messages: int, nursery: Nursery) -> None:
    """One gather of 15 matrices for each axis. Products of parts differ by a tenth of an update: sums of bfloat16."""
    assert Pool(nursery, ranks).run(orthogonalize, tp) == [messages] * ranks


class ByNorms(Optimizer):
    """Steps as long as the tensor, in the groups that say so."""

    def __init__(self, parameters: Any, lr: float = 0.1, by_norm: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "by_norm": by_norm})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() if group["by_norm"] else 1))


class ByNormsOfLosses(ByNorms):
    """Calls what its step is given, as Lightning always gives it something."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Around(Optimizer):
    """Steps with another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(4, 8))
    made.grad = torch.ones(4, 8)
    return made


def test_the_rule_sees_through_rates_groups_and_wrappers() -> None:
    by_norm = ByNorms([parameter()])
    torch.optim.lr_scheduler.LambdaLR(by_norm, lambda step: step / 10)
    assert by_norm.param_groups[0]["lr"] == 0
    assert updates_each_element_alone(by_norm) is False
    groups = [{"params": [parameter()], "by_norm": False}, {"params": [parameter()]}]
    assert updates_each_element_alone(ByNorms(groups)) is False
    assert updates_each_element_alone(ByNorms(groups[:1])) is True
    assert updates_each_element_alone(ByNormsOfLosses([parameter()])) is False
    assert updates_each_element_alone(ByNormsOfLosses(groups[:1])) is True
    assert updates_each_element_alone(Around(ByNorms([parameter()]))) is False
    held = parameter()
    assert updates_each_element_alone(Around(torch.optim.SGD([held], lr=1.0))) is None
    assert held.equal(torch.ones(4, 8))


def test_sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ValueError, match=r"0 \(Embedding\) has sparse=True, .* in the place of torch.optim.SparseAdam"):
        check_optimizers([torch.optim.SparseAdam(layer.parameters())], nn.Sequential(layer))


class ShortRows(Recorder):
    def configure_model(self) -> None:
        super().configure_model()
        self.rows = nn.Embedding(8, 4, max_norm=0.5)


def train_short_rows(make_strategy: Any) -> str:
    with pytest.raises(ValueError, match="max_norm") as caught:
        make_trainer(make_strategy(), max_epochs=1).fit(ShortRows(), batches(2))
    return str(caught.value)


@pytest.mark.parametrize("make_strategy", [FSDP2TPStrategy, DDPStrategy])
def test_norms_of_rows_are_refused(make_strategy: Any, pool2: Pool) -> None:
    for message in pool2.run(train_short_rows, make_strategy, trainer=True):
        assert re.match(r"rows \((FSDP)?Embedding\) has max_norm=0.5: .* use max_norm=None", message)


def test_the_table_in_the_docs_is_this_one() -> None:
    text = (Path(__file__).parents[3] / "docs/optimizers.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, flags=re.M)
    words: dict[str, str] = {EXACT: "yes", ROUNDED: "yes, up to the rounding of its bfloat16"}
    expected = {name: words.get(outcome, "refused") for name, (_, _, outcome) in CASES.items()}
    assert dict(rows) == {**expected, "torch.optim.Rprop": "yes from torch 2.15 on, refused before"}
