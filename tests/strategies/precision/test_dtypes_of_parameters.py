"""Parameters of complex numbers and of float64 beside others in float32: the steps of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.layouts import LAYOUTS
from tests.support.training import HIDDEN, VOCABULARY, batches, make_trainer


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights, and ends in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.complex64) / HIDDEN)
        self.head = nn.Linear(HIDDEN, 4, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.embedding(ids), dim=1) @ self.weight
        return self.head(torch.fft.irfft(frequencies, n=ids.shape[1], dim=1).double())


class Mixed(Noted):
    """Trains it, clipped."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = Spectral()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.model(batch[0]) - batch[0].unsqueeze(-1) % 7).square().mean()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(layout: str | None) -> list[dict[str, Tensor]]:
    """Runs on each rank: gradients of each step, clipped."""
    module = Mixed()
    strategy: Any = LAYOUTS[layout].make() if layout else "auto"
    data = batches(LAYOUTS[layout].data_size if layout else 1)
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2).fit(module, data)
    return module.gradients


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "ddp-2"])
def test_gradients_are_those_of_one_process(layout: str, nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(run, None, trainer=True)
    for found in pool2.run(run, layout, trainer=True):
        assert len(found) == len(expected) > 1
        for one, many in zip(expected, found, strict=True):
            assert {name: gradient.dtype for name, gradient in one.items()} == {n: g.dtype for n, g in many.items()}
            check_gradients(one, many)


def refusal() -> str:
    """Runs on each rank."""
    with pytest.raises(ValueError, match="of which Megatron-FSDP reduces no gradients") as caught:
        make_trainer(LAYOUTS["megatron3-dp2"].make(), max_epochs=1).fit(Mixed(), batches(2))
    return str(caught.value)


def test_megatron_fsdp_names_them(pool2: Pool) -> None:
    for message in pool2.run(refusal, trainer=True):
        assert message.startswith("weight of Spectral is stored in torch.complex64")
