"""Experts that are called with rows of all experts, one below the other, and no routes: Llama 4, and code of users."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.experts import experts_of_rank
from lightning_automodel.parallel.experts.check import check_experts, ignores_zeros
from lightning_automodel.parallel.experts.seam import one_expert_per_row
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.experts import StackedExperts, find_experts
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model

EXPERTS, WIDTH, INNER = 4, 6, 5


class Sorted(nn.Module):
    """Two matrices for each expert, [in, out] or, turned, [out, in]; an activation of one's own."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu, turned: bool = False) -> None:
        super().__init__()
        self.num_experts, self.activation, self.turned = EXPERTS, activation, turned
        up, down = torch.randn(EXPERTS, WIDTH, 2 * INNER), torch.randn(EXPERTS, INNER, WIDTH)
        self.up = nn.Parameter(up.mT.contiguous() if turned else up)
        self.down = nn.Parameter(down.mT.contiguous() if turned else down)

    def forward(self, hidden: Tensor) -> Tensor:
        up, down = (self.up.mT, self.down.mT) if self.turned else (self.up, self.down)
        gate, value = (hidden.view(self.num_experts, -1, WIDTH) @ up).chunk(2, -1)
        return ((self.activation(gate) * value) @ down).reshape(-1, WIDTH)


class Interleaved(Sorted):
    """Takes the rows of the experts in turn."""

    def forward(self, hidden: Tensor) -> Tensor:
        by_expert = hidden.view(-1, self.num_experts, WIDTH).transpose(0, 1).reshape(-1, WIDTH)
        return super().forward(by_expert).view(self.num_experts, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)


class Crowded(Sorted):
    """Makes less of a row where its expert has many."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) / len(hidden)


class Flat(Sorted):
    """Wants another shape than rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.view(self.num_experts, 3, WIDTH))


class WithMask(Sorted):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden * mask)


def found(module: nn.Module) -> tuple[nn.Module, StackedExperts]:
    holder = nn.ModuleDict({"experts": module})
    return holder, find_experts(holder, 2, 2)["experts"]


@pytest.mark.parametrize("turned", [False, True])
def test_every_row_goes_through_its_expert(turned: bool) -> None:
    torch.manual_seed(0)
    holder, experts = found(module := Sorted(turned=turned))
    assert experts.sorts_rows
    check_experts(holder, [experts], "use ep=1")
    rows, owners = torch.randn(7, WIDTH), torch.tensor([2, 0, 2, 3, 2, 0, 2])  # none for the second, most for the third
    run = one_expert_per_row(module, experts, EXPERTS)
    expected = [module(row.expand(EXPERTS, WIDTH))[owner] for row, owner in zip(rows, owners, strict=True)]
    torch.testing.assert_close(run(rows, owners), torch.stack(expected))


@pytest.mark.parametrize("kind", [Interleaved, Crowded, Flat])
def test_what_reads_rows_otherwise_is_refused(kind: type[Sorted]) -> None:
    holder, experts = found(kind())
    with pytest.raises(ValueError, match=rf"experts \({kind.__name__}\) returns is not the sum of .*; use ep=1"):
        check_experts(holder, [experts], "use ep=1")


def test_other_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"called with \(hidden, mask\) and not with .*one expert below those of the"):
        found(WithMask())


@pytest.mark.parametrize(
    ("activation", "ignores"), [(torch.relu, True), (nn.functional.silu, True), (torch.sigmoid, False)]
)
def test_rows_of_zeros_stay_away_where_nothing_comes_of_them(activation: Callable, ignores: bool) -> None:
    """With a sigmoid there are gradients for a row of zeros."""
    _, experts = found(module := Sorted(activation))
    before = module.up.detach().clone()
    assert ignores_zeros(module, experts) is ignores
    assert module.num_experts == EXPERTS
    assert torch.equal(module.up, before)
    assert module.up.grad is None


def computed_rows() -> tuple[int, int]:
    """Runs on each rank: the rows that experts computed, and the tokens that this rank has."""
    model = tiny_model("llama4_text", num_local_experts=4, num_experts_per_tok=1)
    model = parallelize(model, build_mesh(resolve_sizes(2, ep=2), "cpu"))
    ids = torch.arange(3, 27).view(2, 12)
    model(input_ids=ids)
    experts = [of_rank for module in model.modules() if (of_rank := experts_of_rank(module)) is not None]
    return experts[0].rows, ids.numel()


def test_as_many_rows_travel_as_tokens_have_experts(pool2: Pool) -> None:
    rows, tokens = zip(*pool2.run(computed_rows), strict=True)
    assert sum(rows) == sum(tokens)  # and not four times as many
