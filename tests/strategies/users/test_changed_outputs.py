"""Code that writes into what layers return (``x = block(x); x += 1``), where each layer is gathered by itself."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_automodel.testing.pool import Pool
from tests.strategies.megatron.test_megatron_structures import WIDTH, Body, Own, run
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long


class Pair(nn.Module):
    """Returns two tensors, of which one is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).view(1, *x.shape)[0], self.second(x)


class Norms(Own):
    def build(self) -> nn.Module:
        class Changes(Body):
            def forward(self, x: Tensor, number: int) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                    x *= 0.5
                x = self.head(x)
                x += 0.1
                return x

        return Changes([nn.LayerNorm(WIDTH) for _ in range(3)])


class Pairs(Own):
    def build(self) -> nn.Module:
        class Changes(Body):
            def forward(self, x: Tensor, number: int) -> Tensor:
                for block in self.blocks:
                    y, z = block(x)
                    y += x
                    z *= 0.5
                    x = y + z
                return self.head(x)

        return Changes([Pair() for _ in range(3)])


CASES: list[type[Own]] = [Norms, Pairs]


def changed(layout: str) -> list[object]:
    return [run(LAYOUTS[layout].make(), LAYOUTS[layout].data_size, case) for case in CASES]


HERE = ["megatron3-dp2", "megatron1-dp2", "fsdp2-dp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(HERE, *HERE[1:]))
def test_gradients_and_weights_are_those_of_one_process(layout: str, pool2: Pool) -> None:
    for case, found in zip(CASES, pool2.run(changed, layout, trainer=True)[0], strict=True):
        torch.testing.assert_close(found, run(SingleDeviceStrategy(), 1, case), rtol=1e-4, atol=1e-6)
