"""Asks a module of experts, with numbers, whether weights may be applied outside of it."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_automodel._compat.modules import own_parameters
from lightning_automodel._compat.transformers import experts_run_eagerly
from lightning_automodel.plans.experts import StackedExperts

_TOLERANCE = 1e-4


def check_rows(module: nn.Module, experts: StackedExperts) -> None:
    """Compares what two random experts make of two random rows with the weighted sum of what each makes of them.

    Args:
        module: whose own weights are not looked at, and may be on the meta device.
        experts: what is known of it.

    Raises:
        ValueError: if they differ: ranks that have a token could then not weight what other ranks computed of it.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {name: own_parameters(module)[name].shape for name in experts.stacked}  # type: ignore[union-attr]
    values = {name: torch.randn((2, *shape[1:]), generator=generator) * 0.02 for name, shape in shapes.items()}
    hidden = torch.randn(2, _width(module, shapes), generator=generator)
    index, weights = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2, generator=generator)
    with torch.no_grad(), _two_experts(module, experts), experts_run_eagerly(module):
        together = functional_call(module, values, (hidden, index, weights))
        alone = [functional_call(module, values, (hidden, i, torch.ones(2, 1))) for i in index.split(1, dim=1)]
    expected = sum(output * weight for output, weight in zip(alone, weights.split(1, dim=1), strict=True))
    assert isinstance(expected, Tensor)
    error, bound = (together - expected).norm(), _TOLERANCE * expected.norm()
    if error > bound or error.isnan():
        raise ValueError(
            f"ep: what {type(module).__name__} returns is not the sum of what its experts return, times the weights "
            "of the routes: tokens cannot travel to it; use ep=1, where FSDP2 gathers the experts"
        )


def _width(module: nn.Module, shapes: dict[str, torch.Size]) -> int:
    """Read the width of the hidden states off the last matrix, [experts, hidden, inner] or, turned, the other way."""
    last = [shape for shape in shapes.values() if len(shape) == 3][-1]
    return last[2] if getattr(module, "is_transposed", False) else last[1]


@contextmanager
def _two_experts(module: nn.Module, experts: StackedExperts) -> Generator[None, None, None]:
    before = {name: getattr(module, name) for name in experts.counts}
    training = module.training
    module.train(False)
    for name in before:
        setattr(module, name, 2)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        module.train(training)
