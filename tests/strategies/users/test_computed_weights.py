"""Layers whose weight is computed from others in each pass, by hooks or parametrizations, that are sharded alone."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations

from lightning_automodel.testing.pool import Pool
from tests.strategies.megatron.test_megatron_structures import KINDS, WIDTH, Own, run
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long

FORMS = {  # of spectral norms so many iterations that it does not matter how many passes a rank sees
    "hook": utils.weight_norm,
    "hook of spectral norm": partial(utils.spectral_norm, n_power_iterations=100),
    "parametrization": parametrizations.weight_norm,
    "spectral norm": partial(parametrizations.spectral_norm, n_power_iterations=100),
    "orthogonal": parametrizations.orthogonal,
}


class Computed(Own):
    """Each layer is a unit of its own."""

    form: Any

    def build(self) -> nn.Module:
        class Layers(nn.Sequential):
            def forward(self, x: Tensor, number: int) -> Tensor:
                return super().forward(x)

        hidden = [self.form(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        return Layers(hidden[0], nn.Tanh(), hidden[1], nn.Tanh(), self.form(nn.Linear(WIDTH, KINDS)))


def runs(layout: str | None) -> list[Any]:
    results = []
    for form in FORMS.values():
        torch.manual_seed(0)
        strategy = LAYOUTS[layout].make() if layout else SingleDeviceStrategy()
        case = type("Case", (Computed,), {"form": staticmethod(form)})
        results.append(run(strategy, LAYOUTS[layout].data_size if layout else 1, case))
    return results


LAYOUTS_HERE = ["megatron3-dp2", "megatron1-dp2", "fsdp2-dp2", "ddp-2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(LAYOUTS_HERE, *LAYOUTS_HERE[1:]))
def test_gradients_and_weights_are_those_of_one_process(layout: str, pool2: Pool) -> None:
    found = pool2.run(runs, layout, trainer=True, timeout=90)[0]
    for name, actual, expected in zip(FORMS, found, runs(None), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
