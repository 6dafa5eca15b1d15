"""Code that writes into what layers return (``x = block(x); x += 1``), where each layer is gathered by itself."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_automodel.testing.pool import Pool
from tests.strategies.test_megatron_structures import KINDS, WIDTH, Own, run
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long


class Pair(nn.Module):
    """Returns two tensors, of which one is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).view(1, *x.shape)[0], self.second(x).sigmoid()


class Changed(Own):
    def build(self) -> nn.Module:
        class Changes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
                self.pairs = nn.ModuleList(Pair() for _ in range(2))
                self.head = nn.Linear(WIDTH, KINDS)

            def forward(self, x: Tensor, number: int) -> Tensor:
                for norm, pair in zip(self.norms, self.pairs, strict=True):
                    x = norm(x)
                    x *= 0.5
                    y, z = pair(x)
                    y += x
                    x = y + z
                x = self.head(x)
                x += 0.1
                return x

        return Changes()


def changed(layout: str) -> object:
    return run(LAYOUTS[layout].make(), LAYOUTS[layout].data_size, Changed)


HERE = ["megatron3-dp2", "megatron1-dp2", "fsdp2-dp2"]


@pytest.mark.parametrize("layout", with_long(HERE, *HERE[1:]))
def test_gradients_and_weights_are_those_of_one_process(layout: str, pool2: Pool) -> None:
    found = pool2.run(changed, layout, trainer=True)[0]
    torch.testing.assert_close(found, run(SingleDeviceStrategy(), 1, Changed), rtol=1e-4, atol=1e-6)
