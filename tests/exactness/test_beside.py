"""Models of no library whose split layers give more than their sum, or take more than the stream."""

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
        x, first, logits, aux = self.embed(input_ids), None, None, torch.zeros(())
        for block in self.blocks:
            x, first, logits, loss, size = block(x, first, logits, (angles.cos(), angles.sin()))
            aux = aux + loss + (size if self.reads_sizes else 0)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + 0.3 * aux + logits.mean())


PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
    **{"blocks.*.attention.o": "rowwise", "blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"},
}


def build(attention: type[Attention], reads_sizes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model(attention, reads_sizes)


def errors(sizes: dict[str, int], world: int, levers: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    return [
        compare(partial(build, kind), sizes, world, SCHEDULE, FSDP2Config(tp_plan=PLAN, **lever)).largest
        for lever in levers
        for kind in (Attention, Packing, Naming, Listing)
    ]


LEVERS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": True},
    {"activation_checkpointing": True},
    {"enable_compile": True, "compile_backend": "aot_eager"},
]


@pytest.mark.slow
def test_what_layers_hand_each_other_and_losses_read_is_exact(pool2: Pool) -> None:
    for found in pool2.run(errors, {"tp": 2}, 2, LEVERS):
        assert [error for error in found if error[0] > BOUND] == []


@pytest.mark.long
def test_over_data_ranks(pool4: Pool) -> None:
    for found in pool4.run(errors, {"dp_shard": 2, "tp": 2}, 4, LEVERS[:2]):
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
