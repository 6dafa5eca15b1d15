"""Experts that are called with rows of all experts, one below the other, and no routes: Llama 4, and code of users."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.experts import check, experts_of_rank
from lightning_automodel.parallel.experts.check import check_experts, ignores_zeros
from lightning_automodel.parallel.experts.dispatch import select
from lightning_automodel.parallel.experts.seam import one_expert_per_row, routed
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


class Apart(Sorted):
    """Takes the rows of the experts in a dim of their own."""

    def forward(self, hidden: Tensor) -> Tensor:
        _, rows, _ = hidden.shape
        return super().forward(hidden.view(-1, WIDTH)).view(self.num_experts, rows, WIDTH)


class Broadcast(Sorted):
    """Gives all rows to all experts."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = (hidden @ self.up).chunk(2, -1)
        return (self.activation(gate) * value) @ self.down


class Routing(Sorted):
    """Chooses experts itself, for rows in any order."""

    kept = 1

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def scores(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.router.mT).softmax(-1)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.scores(hidden).topk(self.kept, -1)
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            gate, value = (hidden @ self.up[expert]).chunk(2, -1)
            of_expert = (self.activation(gate) * value) @ self.down[expert]
            output = output + (weights * (chosen == expert)).sum(-1, keepdim=True) * of_expert
        return output


class RoutingToTwo(Routing):
    kept = 2


class RoutedByAnother(Routing):
    """Asks a router that is not its own."""

    def __init__(self) -> None:
        Sorted.__init__(self)
        self.elsewhere = [nn.Linear(WIDTH, EXPERTS, bias=False)]

    def scores(self, hidden: Tensor) -> Tensor:
        return self.elsewhere[0](hidden).softmax(-1)


class Ungated(Sorted):
    """One matrix up and one down, stored in any order: nothing but the code tells which dim is the width."""

    def __init__(self, turned: bool, down_first: bool) -> None:
        super().__init__(turned=turned)
        up = torch.randn(EXPERTS, INNER, WIDTH) if turned else torch.randn(EXPERTS, WIDTH, INNER)
        self.up = nn.Parameter(up)
        if down_first:
            self._parameters["up"] = self._parameters.pop("up")

    def forward(self, hidden: Tensor) -> Tensor:
        up, down = (self.up.mT, self.down.mT) if self.turned else (self.up, self.down)
        return ((hidden.view(self.num_experts, -1, WIDTH) @ up).tanh() @ down).reshape(-1, WIDTH)


class Shrinking(Sorted):
    """Has biases, of which something comes where they are large."""

    def __init__(self) -> None:
        super().__init__(nn.functional.hardshrink)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = (hidden.view(self.num_experts, -1, WIDTH) @ self.up + self.bias.unsqueeze(1)).chunk(2, -1)
        return ((self.activation(gate) * value) @ self.down).reshape(-1, WIDTH)


class OtherwiseInTraining(Sorted):
    def forward(self, hidden: Tensor) -> Tensor:
        self.activation = torch.sigmoid if self.training else torch.relu
        return super().forward(hidden)


class Unlearned(Sorted):
    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


class Directed(Sorted):
    """Reads the directions of rows, and zeros have none."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden / hidden.norm(dim=-1, keepdim=True))


class WithMask(Sorted):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden * mask)


class WithAnything(Sorted):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(args[0] if len(args) == 1 else args[0] * args[1])


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


KINDS = [Interleaved, Crowded, Flat, Apart, Broadcast, Routing, RoutingToTwo, RoutedByAnother]


@pytest.mark.parametrize("kind", KINDS)
def test_what_reads_rows_otherwise_is_refused(kind: type[Sorted]) -> None:
    holder, experts = found(kind())
    with pytest.raises(ValueError, match=rf"experts \({kind.__name__}\) returns is not the sum of .*; use ep=1"):
        check_experts(holder, [experts], "use ep=1")


@pytest.mark.parametrize(("kind", "inputs"), [(WithMask, "hidden, mask"), (WithAnything, "args")])
def test_other_inputs_are_refused(kind: type[Sorted], inputs: str) -> None:
    with pytest.raises(ValueError, match=rf"called with \({inputs}\) and not with .*one expert below those of the"):
        found(kind())


def test_inputs_that_a_forward_of_ones_own_adds_are_refused() -> None:
    module = Sorted()
    holder, experts = found(module)
    module.forward = lambda hidden, scale=1.0: Sorted.forward(module, hidden) * scale  # type: ignore[method-assign]
    check_experts(holder, [experts], "use ep=1")
    rows = torch.randn(8, WIDTH)
    assert routed(module, experts, (rows,), {})[0] is rows
    for args, kwargs in [((rows, 2.0), {}), ((rows,), {"scale": 2.0})]:
        with pytest.raises(TypeError, match=r"experts \(Sorted\) is called with . inputs .*hidden alone; use ep=1"):
            routed(module, experts, args, kwargs)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("down_first", [False, True])
def test_experts_without_gates_are_taken(turned: bool, down_first: bool) -> None:
    holder, experts = found(module := Ungated(turned, down_first))
    check_experts(holder, [experts], "use ep=1")
    assert not ignores_zeros(module, experts)  # a gradient of the row comes of it


def test_what_fills_up_rows_makes_no_nan_of_gradients() -> None:
    holder, experts = found(module := Directed())
    check_experts(holder, [experts], "use ep=1")
    assert not ignores_zeros(module, experts)
    run = one_expert_per_row(module, experts, EXPERTS)
    run(torch.randn(3, WIDTH), torch.tensor([2, 0, 2])).sum().backward()
    select(
        torch.randn(2, WIDTH), torch.tensor([[3], [3]]), torch.ones(2, 1), run, torch.arange(4), 0, 2
    ).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())  # type: ignore[union-attr]


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


@pytest.mark.parametrize(("kind", "ignores"), [(Shrinking, False), (OtherwiseInTraining, False), (Unlearned, True)])
def test_what_comes_of_zeros_with_other_weights_or_in_training(kind: type[Sorted], ignores: bool) -> None:
    module = kind().eval()  # type: ignore[call-arg]
    holder, experts = found(module)
    check_experts(holder, [experts], "use ep=1")
    assert ignores_zeros(module, experts) is ignores


def test_modules_that_compute_alike_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    answer = check.ignores_zeros
    monkeypatch.setattr(
        check, "ignores_zeros", lambda module, experts: (asked.append(module), answer(module, experts))[1]
    )
    one, other, another = Sorted(), Sorted(), Sorted(torch.sigmoid)
    holder = nn.ModuleDict({"a": one, "b": other, "c": another})
    assert check.ignoring_zeros(holder, find_experts(holder, 2, 2).values()) == {"a", "b"}
    assert asked == [one, another]


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
