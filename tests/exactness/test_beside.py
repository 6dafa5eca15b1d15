"""Models of no library whose split layers give more than their sum, or take more than the stream."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, batches, compare
from tests.support.marks import with_long, with_slow

BOUND, WIDTH, HEAD = 1e-5, 16, 4
SCHEDULE = Schedule(steps=2)


class Attention(nn.Module):
    """Adds the values of the first layer to its own, and rotates by frequencies that come in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.share = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor, first: Any, rotary: tuple[Tensor, Tensor]) -> tuple:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        value = v if first is None else v + self.share * self.unpack(first)
        cosines, sines = rotary
        q, k = (torch.cat((y * cosines, y * sines), -1) for y in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, value, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2)), self.pack(v) if first is None else first, q.square().mean()

    pack = unpack = staticmethod(lambda value: value)


class Packing(Attention):
    """Hands its values on within a tuple."""

    pack, unpack = staticmethod(lambda value: (value,)), staticmethod(lambda value: value[0])


class Given(NamedTuple):
    """What attention of a user gives, by name."""

    mixed: Tensor
    first: Any
    size: Tensor


class Naming(Attention):
    def forward(self, *args: Any) -> Given:
        return Given(*super().forward(*args))


class Listing(Attention):
    def forward(self, *args: Any) -> list:  # type: ignore[override]
        return [*super().forward(*args)]


class Keying(Attention):
    """Hands its values on within a dict."""

    pack, unpack = staticmethod(lambda value: {"first": value}), staticmethod(lambda value: value["first"])


@dataclass
class Held:
    value: Tensor


class Holding(Attention):
    """Hands its values on within a dataclass."""

    pack, unpack = staticmethod(Held), staticmethod(lambda held: held.value)


class Sloped(Attention):
    """Adds slopes of the heads, of which the first layer's are handed on: no input is part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(WIDTH // HEAD))

    def forward(self, x: Tensor, first: Any, rotary: Any) -> tuple:
        slopes = self.slopes.exp() if first is None else first
        given = super().forward(x, slopes[:, None, None], rotary)
        return given[0], slopes, given[2]


class Appending(Attention):
    """Puts its values into the list in which whole ones come."""

    def forward(self, x: Tensor, first: Any, rotary: Any) -> tuple:
        mixed, value, size = super().forward(x, rotary[2] if len(rotary) > 2 else None, rotary[:2])
        if len(rotary) == 2:
            rotary.append(value)
        return mixed, None, size


class Noting(Attention):
    """Puts what a loss is to read into the list that comes, of whole values."""

    def forward(self, x: Tensor, first: Any, rotary: Any) -> tuple:
        mixed, _, size = super().forward(x, None, rotary)
        first.append((x * self.share).square().mean())
        return mixed, first, size


class Seen(Attention):
    """Hands on what a loss reads, too."""


class Router(nn.Module):
    """Weighs what it gives, and gives what a loss and the next layer's router read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, before: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.router(x) + (0 if before is None else 0.3 * before)
        output = self.down(functional.gelu(self.up(x))) * logits.softmax(-1)[..., :1]
        return output, (logits.logsumexp(-1).square().mean(), logits)


_CONTAINERS = {Naming: Given, Listing: list}


class Block(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.attention, self.ffn = attention(), Router()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, first: Any, logits: Any, rotary: tuple[Tensor, Tensor]) -> tuple:
        given = self.attention(self.norms[0](x), first, rotary)
        assert isinstance(given, _CONTAINERS.get(type(self.attention), tuple))
        mixed, first, size = given
        x = x + mixed
        output, (loss, logits) = self.ffn(self.norms[1](x), logits)
        return x + output, first, logits, loss, size


class Model(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, attention: type[Attention], reads_sizes: bool) -> None:
        super().__init__(PreTrainedConfig())
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(3))
        self.frequencies, self.reads_sizes = nn.Parameter(torch.rand(HEAD)), reads_sizes

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        angles = torch.arange(input_ids.shape[1])[:, None] * self.frequencies
        rotary = self.container((angles.cos(), angles.sin()))
        x, first, logits, aux = self.embed(input_ids), self.first(), None, torch.zeros(())
        for block in self.blocks:
            x, first, logits, loss, size = block(x, first, logits, rotary)
            first = self.between(first)
            aux = aux + loss + (size if self.reads_sizes else 0)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + 0.3 * aux + logits.mean())

    container: Any = tuple
    between: Any = staticmethod(lambda value: value)

    def first(self) -> Any:
        """Give what enters the first layer as values of the layer before."""
        return None


class WithSlopes(Model):
    """Has slopes of all heads, which no layer computes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slopes = nn.Parameter(torch.rand(WIDTH // HEAD))

    def first(self) -> Tensor:
        return self.slopes[:, None, None]


class WithList(Model):
    container = list


class WithNotes(Model):
    """Has a loss of what layers put into a list."""

    def first(self) -> list:
        self.notes: list[Tensor] = []
        return self.notes

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        loss = super().forward(input_ids, labels).loss
        return SimpleNamespace(loss=loss + sum(self.notes))


class WithSeen(Model):
    """Has a loss of what the first block gives to the others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda block, args, output: self.seen.append(output[1]))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        loss = super().forward(input_ids, labels).loss
        return SimpleNamespace(loss=loss + self.seen.pop().square().mean())


class Mixing(Attention):
    """Adds values from which a model takes the mean of all heads, between layers."""


class WithMeans(Model):
    between = staticmethod(lambda value: value - value.mean(1, keepdim=True))


class Changed(Attention):
    """Adds values that a model has changed between layers, each number by itself."""


class WithChanges(Model):
    between = staticmethod(lambda value: (0.7 * value.tanh()).to(value.dtype))


PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
    **{"blocks.*.attention.o": "rowwise", "blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"},
}
SLOPES: dict[type[Attention], dict[str, str]] = {Sloped: {"blocks.*.attention.slopes": "colwise"}}
MODELS: dict[type[Attention], type[Model]] = {
    **{Appending: WithList, Noting: WithNotes, Seen: WithSeen},
    **{Mixing: WithMeans, Changed: WithChanges},
}


def build(attention: type[Attention], reads_sizes: bool = False, model: type[Model] = Model) -> nn.Module:
    torch.manual_seed(0)
    return MODELS.get(attention, model)(attention, reads_sizes)


def errors(sizes: dict[str, int], world: int, levers: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    return [
        compare(partial(build, kind), sizes, world, SCHEDULE, FSDP2Config(tp_plan=PLAN, **lever)).largest
        for lever in levers
        for kind in (Attention, Packing, Naming, Listing, Changed)
    ]


LEVERS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"activation_checkpointing": True},
    {"enable_compile": True, "compile_backend": "aot_eager"},
]


@pytest.mark.slow
@pytest.mark.parametrize("lever", with_long(LEVERS, LEVERS[2]), ids=str)
def test_what_layers_hand_each_other_and_losses_read_is_exact(lever: dict[str, Any], pool2: Pool) -> None:
    for found in pool2.run(errors, {"tp": 2}, 2, [lever], timeout=180):
        assert [error for error in found if error[0] > BOUND] == []


def errors_of_containers(sizes: dict[str, int], world: int, levers: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    of_model = partial(build, Attention, model=WithSlopes)
    kinds: tuple[type[Attention], ...] = (Sloped, Keying, Holding, Appending)
    cases = [(partial(build, kind), SLOPES.get(kind, {})) for kind in kinds]
    cases.append((of_model, {"slopes": "colwise"}))
    return [
        compare(make, sizes, world, SCHEDULE, FSDP2Config(tp_plan=PLAN | rules, **lever)).largest
        for lever in levers
        for make, rules in cases
    ]


@pytest.mark.parametrize("lever", with_slow(LEVERS[:3], *LEVERS[1:3]), ids=str)
def test_values_of_parameters_alone_and_in_containers_are_exact(lever: dict[str, Any], pool2: Pool) -> None:
    for found in pool2.run(errors_of_containers, {"tp": 2}, 2, [lever]):
        assert [error for error in found if error[0] > BOUND] == []


@pytest.mark.long
def test_over_data_ranks(pool4: Pool) -> None:
    for run in (errors, errors_of_containers):
        for found in pool4.run(run, {"dp_shard": 2, "tp": 2}, 4, LEVERS[:2], timeout=180):
            assert [error for error in found if error[0] > BOUND] == []


def read_sizes() -> str:
    """Runs on each rank: a loss reads a mean over the heads of a rank."""
    model = parallelize(build(Attention, reads_sizes=True), build_mesh(resolve_sizes(2, tp=2), "cpu"), WITHOUT_LEVERS)
    with pytest.raises(ValueError, match="a loss reads what") as caught:
        model.train()(**batches(SCHEDULE, 0, 0)[0]).loss.backward()
    return str(caught.value)


WITHOUT_LEVERS = FSDP2Config(tp_plan=PLAN)


def test_a_loss_of_a_slice_is_refused(pool2: Pool) -> None:
    for said in pool2.run(read_sizes):
        assert "blocks.2.attention (Attention) returns beside its first output" in said


def read(kind: type[Attention], **lever: Any) -> str:
    """Runs on each rank: a loss reads what layers hand to each other, or put into a list that they are given."""
    config = FSDP2Config(tp_plan=PLAN, **lever)
    model = parallelize(build(kind), build_mesh(resolve_sizes(2, tp=2), "cpu"), config)
    with pytest.raises(ValueError, match="a loss reads what") as caught:
        model.train()(**batches(SCHEDULE, 0, 0)[0]).loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("lever", LEVERS, ids=str)
def test_a_loss_of_what_is_handed_on_is_refused(lever: dict[str, Any], pool2: Pool) -> None:
    for said in pool2.run(read, Noting, **lever):
        assert "blocks.2.attention (Noting) writes into a list, a dict or an object that it is given" in said
    for said in pool2.run(read, Seen, **lever):
        assert "blocks.0.attention (Seen) returns beside its first output" in said


def mix() -> str:
    """Runs on each rank."""
    model = parallelize(build(Mixing), build_mesh(resolve_sizes(2, tp=2), "cpu"), WITHOUT_LEVERS)
    with pytest.raises(ValueError, match="may compute across them") as caught:
        model.train()(**batches(SCHEDULE, 0, 0)[0])
    return str(caught.value)


def test_what_mixes_heads_between_layers_is_refused(pool2: Pool) -> None:
    for said in pool2.run(mix):
        assert "what blocks.1.attention is given" in said
        assert "has gone through Mean between the two" in said


class Dictionary(Attention):
    def forward(self, *args: Any) -> Any:
        return dict(zip("abc", super().forward(*args), strict=True))


def give_a_dict() -> None:
    """Runs on each rank."""
    model = parallelize(build(Dictionary), build_mesh(resolve_sizes(2, tp=2), "cpu"), WITHOUT_LEVERS)
    with pytest.raises(ValueError, match="it returns a dict"):
        model(**batches(SCHEDULE, 0, 0)[0])


def test_outputs_of_other_kinds_are_refused(pool2: Pool) -> None:
    pool2.run(give_a_dict)


def count_tokens() -> tuple[float, str]:
    """Runs on each rank: gradients of rows are divided by how often a token occurs."""

    def build_counting() -> nn.Module:
        model = build(Attention)
        model.embed.scale_grad_by_freq = True
        return model

    config = FSDP2Config(tp_plan=PLAN | {"embed": "embedding_rowwise"})
    return compare(build_counting, {"tp": 2}, 2, SCHEDULE, config).largest


def test_a_split_embedding_counts_its_own_tokens(pool2: Pool) -> None:
    for error in pool2.run(count_tokens):
        assert error[0] <= BOUND, error
