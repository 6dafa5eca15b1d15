"""Modules of users that do more than a sum over the ranks does: equal to one process, or refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.linearity import Kind, NotASumError, kind_of_result, mark
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE
from tests.support.comparison import batches, compare
from tests.support.training import Recorder, make_trainer, world_size
from tests.support.training import batches as rows_of_training

WIDTH, INNER = 24, 34
PLAN = {f"blocks.*.ffn.{name}": style for name, style in (("up", "colwise"), ("down", "rowwise"))}
BARE = {"blocks.*.ffn.into": "colwise", "blocks.*.ffn.out": "rowwise"}
SEPARATE = {**PLAN, "blocks.*.ffn": "separate"}


class FeedForward(nn.Module):
    """The plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.shift, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((WIDTH,), 0.5))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class NormInside(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x)) * self.scale


class Gated(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.dropout(self.inner(x), 0.25, self.training) * self.gate(x).sigmoid()


class TwoSums(FeedForward):
    """Experts in a loop, into a buffer; a scalar multiple and what Python's ``sum`` adds."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x).flatten(0, 1)
        chosen = (x.flatten(0, 1)[:, 0] > 0).nonzero().flatten()
        out.index_add_(0, chosen, self.inner(x.flatten(0, 1)[chosen]))
        out[chosen] += self.inner(x.flatten(0, 1)[chosen]) / 3
        return sum([out.view_as(x), self.inner(-x).float()])


class Uncalled(FeedForward):
    """A parent that computes with the matrix of a child."""

    def inner(self, x: Tensor) -> Tensor:
        return functional.linear(functional.gelu(self.up(x)), self.down.weight, self.down.bias)


class Composed(FeedForward):
    """Both terms of a matrix have one gradient, which is added to by the next micro-batch and scaled by clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn(INNER, WIDTH) / 9)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(functional.linear(x, self.up.weight + self.delta, self.up.bias)))


class Bare(FeedForward):
    """Parameters without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(INNER, WIDTH)), nn.Parameter(torch.randn(WIDTH, INNER) / 9)

    def inner(self, x: Tensor) -> Tensor:
        return functional.gelu(x @ self.into.t()) @ self.out.t()


class OwnInput(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class OwnInputBehindNorm(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x)) + x


class Parallel(FeedForward):
    """Two branches, of which one is not split."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.inner(x)


class Shifted(FeedForward):
    """A zero that is learned."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shift


class Bent(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Squared(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner(-x)


class Constant(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - self.inner(x)


class Chained(FeedForward):
    """Two linear pairs, one behind the other."""

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.down(self.up(x))))


class UncalledOwnInput(Uncalled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class BareOwnInput(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.inner(x), x)


class Dropped(FeedForward):
    """Nothing of the sum comes out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).new_ones(()) * x


class Soft(FeedForward):
    """Its features compete, of which a rank has a part."""

    def inner(self, x: Tensor) -> Tensor:
        return self.down((2 * self.up(x)).softmax(-1))


class Normed(FeedForward):
    def inner(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(x))
        return self.down(h / h.norm(dim=-1, keepdim=True))


class Tabled(FeedForward):
    """It knows how many features there are, as attention with a table for all heads does."""

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) + x.new_ones(INNER))


class Scaled(FeedForward):
    """It has a number of its own for each feature, of which the plan says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(INNER))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.factors[None])


class OverTokens(FeedForward):
    """The same over the tokens, of which every rank has all."""

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(1))


class Block(nn.Module):
    def __init__(self, kind: type[FeedForward]) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Between(FeedForward):
    """A whole parameter that works on slices."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, kind: type[FeedForward]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def build(kind: type[FeedForward]) -> nn.Module:
    torch.manual_seed(0)
    model = Model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("shift"):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


SUMS = {kind: PLAN for kind in (FeedForward, NormInside, Gated, TwoSums, Uncalled, Between, OverTokens)} | {
    Composed: {**PLAN, "blocks.*.ffn.delta": "colwise"},
    Scaled: {**PLAN, "blocks.*.ffn.factors": "colwise"},
    Bare: BARE,
}
NO_SUMS = {
    OwnInput: "add adds to it what every rank has",
    OwnInputBehindNorm: "add adds to it what every rank has",
    Parallel: "add adds to it what every rank has",
    Shifted: "add adds to it what every rank has",
    Bent: "tanh is not a linear function of it",
    Squared: "mul multiplies such terms with each other",
    Constant: "rsub adds to it what every rank has",
    Dropped: "what it returns is not made of it",
    Chained: "down gives is a rank's term of that sum, but",
}


ACROSS = {
    Soft: "softmax computes across features",
    Normed: "norm computes across features",
    Tabled: "add cannot be computed on a rank's part (The size of tensor a",
    Scaled: "mul cannot be computed on a rank's part (The size of tensor a",
}


def errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    levers = {"enable_compile": True, "compile_backend": "aot_eager", "activation_checkpointing": True}
    plans = SUMS | dict.fromkeys(NO_SUMS, SEPARATE)
    cases = {kind.__name__: (kind, FSDP2Config(tp_plan=plan)) for kind, plan in plans.items()}
    cases["between"] = (
        Between,
        FSDP2Config(tp_plan={**SEPARATE, "blocks.*.ffn.act": "replicated_with_grad_allreduce"}),
    )
    cases["compiled"] = (NormInside, FSDP2Config(tp_plan=PLAN, **levers))
    return {
        name: compare(partial(build, kind), {"tp": 2}, 2, SCHEDULE, config).largest
        for name, (kind, config) in cases.items()
    }


@pytest.mark.slow
def test_sums_are_exact_and_so_is_what_takes_its_collectives_one_by_one(pool2: Pool) -> None:
    for found in pool2.run(errors):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def messages() -> dict[str, str]:
    """Runs on each rank: what the first forward pass says, in training and in evaluation, and the passes after it."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    plans = dict.fromkeys([*NO_SUMS, *ACROSS], PLAN) | {UncalledOwnInput: PLAN, BareOwnInput: BARE}
    for i, (kind, plan) in enumerate(plans.items()):
        compiled = {"enable_compile": True, "compile_backend": "eager"} if i % 3 == 0 else {}
        model = parallelize(build(kind), mesh, FSDP2Config(tp_plan=plan, **compiled)).train(i % 2 == 0)
        found[kind.__name__] = ""
        for _ in range(2):
            try:
                model(**batches(SCHEDULE, 0, 0)[0])
            except ValueError as error:
                found[kind.__name__] = str(error)
    return found


def test_what_is_no_sum_is_refused(pool2: Pool) -> None:
    expected = NO_SUMS | {UncalledOwnInput: "add adds to it what", BareOwnInput: "add adds to it what"}
    for found in pool2.run(messages):
        for kind, problem in expected.items():
            assert f"blocks.0.ffn ({kind.__name__}) is summed over the tp ranks" in found[kind.__name__], kind
            assert problem in found[kind.__name__], kind
            assert "'blocks.*.ffn': 'separate'" in found[kind.__name__], kind

        for kind, what in ACROSS.items():
            problem = f"blocks.0.ffn ({kind.__name__}) is split over the tp ranks, and {what}"
            assert problem in found[kind.__name__], kind
            has_vector = "a rule 'colwise' (blocks.*.ffn.factors). Else leave the module whole" in found[kind.__name__]
            assert has_vector == (kind is Scaled)


def test_what_moves_elements_or_multiplies_by_a_whole_matrix_keeps_a_term() -> None:
    term = torch.ones(2, 4)
    mark(term, Kind.PARTIAL)
    for name in ("ravel", "hsplit", "rot90", "fliplr", "atleast_3d", "conv3d", "conv_transpose1d"):
        operands = (term, torch.ones(4)) if name.startswith("conv") else (term,)
        assert kind_of_result(name, operands, {}, lambda value: False) is Kind.PARTIAL, name
    with pytest.raises(NotASumError, match="adds to it what every rank has"):
        kind_of_result("conv3d", (term, torch.ones(4), torch.ones(2)), {}, lambda value: False)


def said_of_first_step(plan: dict[str, str]) -> str:
    """Runs on each rank: what the first step of an optimizer says."""
    model = parallelize(build(Between), build_mesh(resolve_sizes(2, tp=2), "cpu"), FSDP2Config(tp_plan=plan))
    model(**batches(SCHEDULE, 0, 0)[0]).loss.backward()
    try:
        torch.optim.SGD(model.parameters()).step()
    except ValueError as error:
        return str(error)
    return ""


def test_gradients_of_whole_parameters_that_differ_are_refused(pool2: Pool) -> None:
    for message in pool2.run(said_of_first_step, SEPARATE):
        assert "act.weight is whole on every tp rank, but their gradients differ" in message
        assert "'blocks.*.ffn.act' the style 'replicated_with_grad_allreduce'" in message


def test_gradients_that_are_no_terms_of_a_sum_are_refused(pool2: Pool) -> None:
    sums = {name: "replicated_with_grad_allreduce" for name in ("blocks.*.ffn.act", "embed")}
    for message in pool2.run(said_of_first_step, {**SEPARATE, **sums}):
        assert "embed.weight has the style replicated_with_grad_allreduce, but its gradients are the same" in message
        assert "Take 'embed' out of the tensor-parallel plan" in message


# ---- under the trainer -----------------------------------------------------------------------------------------------


class Own(Recorder):
    """A model that transformers does not know, with a layer beside it."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.beside = build(NormInside), nn.Linear(1, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss + self.beside(loss.view(1, 1)).square().sum()


def losses(tp: int, plan: dict[str, str] | None) -> list[float] | str:
    """Runs on each rank."""
    module = Own()
    run = make_trainer({"tp": tp, "config": FSDP2Config(tp_plan=plan)}, max_epochs=1, accumulate_grad_batches=2)
    try:
        run.fit(module, rows_of_training(world_size() // tp))
    except ValueError as error:
        return str(error)
    return module.losses


def test_a_module_of_a_user_under_the_trainer(pool2: Pool) -> None:
    expected = pool2.run(losses, 1, None, trainer=True)[0]
    for found in pool2.run(losses, 2, PLAN, trainer=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for plan in (None, {f"model.{rule}": style for rule, style in PLAN.items()}):
        for message in pool2.run(losses, 2, plan, trainer=True):
            assert "model (Model), beside (Linear)" in message
            assert "such as 'blocks.*.ffn.up'" in message
