"""Models and blocks that return objects of classes of their own, in which FSDP2 sees no tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND
from tests.support.comparison import compare

WIDTH, VOCABULARY = 16, 128


class Held:
    """Not a container that anybody knows."""

    def __init__(self, **values: Any) -> None:
        self.values = [values]

    def __getattr__(self, name: str) -> Any:
        if name == "values":
            raise AttributeError(name)
        return self.values[0].get(name)


@dataclass
class Data:
    """Known to some releases of torch."""

    logits: Tensor
    loss: Tensor | None = None


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("logits", "loss")

    def __init__(self, logits: Tensor, loss: Tensor | None = None) -> None:
        self.logits, self.loss = logits, loss


class Block(nn.Module):
    """A step of a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class HiddenBlock(Block):
    """Hides the stream."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return Held(x=super().forward(x))


class Model(nn.Module):
    """Without blocks, all parameters are those of the root."""

    def __init__(self, kind: type, blocks: int, block: type[nn.Module], frozen: bool) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for part in (self.embed, self.layers):
            part.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x if isinstance(x, Tensor) else x.x
        return self.kind(logits=self.head(x))


CASES = {
    "no blocks": (Held, 0, Block, False),
    "dataclass": (Data, 0, Block, False),
    "slots": (Slots, 0, Block, False),
    "blocks": (Held, 2, Block, False),
    "only the head trains": (Held, 2, Block, True),
    "blocks that hide": (Held, 3, HiddenBlock, False),
}


def error_of(case: str, mode: bool) -> tuple[float, str]:
    """Runs on each rank."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Model(*CASES[case])

    return compare(build, {"dp_shard": 2}, 2, config=FSDP2Config(activation_checkpointing=mode)).largest


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(pool2: Pool, case: str) -> None:
    for error, where in pool2.run(error_of, case, False):
        assert error <= BOUND, where


@pytest.mark.parametrize("case", ["blocks", "blocks that hide"])
def test_recomputed_blocks(pool2: Pool, case: str) -> None:
    for error, where in pool2.run(error_of, case, True):
        assert error <= BOUND, where
