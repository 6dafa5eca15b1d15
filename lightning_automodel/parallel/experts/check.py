"""Asks modules of experts, with numbers, whether rows may be computed apart and weights be applied outside of them."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_automodel._compat.fake_shapes import is_fake
from lightning_automodel._compat.modules import own_parameters
from lightning_automodel._compat.transformers import experts_run_eagerly
from lightning_automodel.distributed.random_numbers import places_of_generators
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.wrappers import unwrapped
from lightning_automodel.parallel.traces import WithoutDropout, leaving_no_trace
from lightning_automodel.plans.experts import StackedExperts

_TOLERANCE = 1e-4
_ROWS, _APART = 16, 4
_OFTEN = 7  # of eight rows go to the first expert, where they go to one


def check_experts(model: nn.Module, found: Iterable[StackedExperts]) -> None:
    """Check each kind of experts in ``model`` once; what is assigned to ``forward`` makes one of its own.

    Raises:
        ValueError: as :func:`check_rows`.
    """
    modules = [(unwrapped(model.get_submodule(experts.name)), experts) for experts in found]
    for module, experts in {(type(m), code_of(m)): (m, e) for m, e in modules}.values():
        check_rows(module, experts)


def check_rows(module: nn.Module, experts: StackedExperts) -> None:
    """Compares what two random experts make of random rows with the weighted sum of what each makes of a few of them.

    As in evaluation and as in training, but for dropout; code that draws otherwise cannot be compared.

    Args:
        module: whose own weights are not looked at, and may be on the meta device.
        experts: what is known of it.

    Raises:
        ValueError: if they differ: ranks that have a token could then not weight what other ranks computed of it, or
            a token's row depends on the rows beside it, which are others where tokens travel.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {name: own_parameters(module)[name].shape for name in experts.stacked}  # type: ignore[union-attr]
    values = {name: torch.randn((2, *shape[1:]), generator=generator) * 0.02 for name, shape in shapes.items()}
    hidden = torch.randn(_ROWS, _width(module, shapes), generator=generator)
    weights, rows = torch.rand(_ROWS, 2, generator=generator), torch.arange(_ROWS)
    both, one = torch.stack([rows % 2, 1 - rows % 2], dim=1), (rows % (_OFTEN + 1) == _OFTEN).long()[:, None]
    with torch.no_grad(), leaving_no_trace(module), _two_experts(module, experts), experts_run_eagerly(module):
        for training in (False, True):
            module.train(training)
            for index in (both, one):
                if not _is_sum_of_rows(module, values, hidden, index, weights[:, : index.shape[1]]):
                    raise ValueError(_message(module))


def _is_sum_of_rows(
    module: nn.Module, values: dict[str, Tensor], hidden: Tensor, index: Tensor, weights: Tensor
) -> bool:
    before = places_of_generators()
    together = _run(module, values, hidden, index, weights)
    if is_fake(together):
        return True
    expected = torch.zeros_like(together)
    for rows in torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0)).split(_APART):
        for route, weight in zip(index[rows].split(1, dim=1), weights[rows].split(1, dim=1), strict=True):
            expected[rows] += _run(module, values, hidden[rows], route, torch.ones_like(weight)) * weight
    error, bound = (together - expected).norm(), _TOLERANCE * expected.norm()
    return places_of_generators() != before or bool(error <= bound)  # of NaN nothing is true


def _run(module: nn.Module, values: dict[str, Tensor], *args: Tensor) -> Tensor:
    with WithoutDropout():
        return functional_call(_Forward(module), {f"module.{name}": value for name, value in values.items()}, args)


class _Forward(nn.Module):
    """The forward pass of a module without its hooks, which stay around what travels."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.forward(*args)


def _message(module: nn.Module) -> str:
    return (
        f"ep: what {type(module).__name__} returns is not the sum of what its experts return of each row alone, times "
        "the weights of the routes: tokens cannot travel to it; use ep=1, where FSDP2 gathers the experts"
    )


def _width(module: nn.Module, shapes: dict[str, torch.Size]) -> int:
    """Read the width of the hidden states off the last matrix, [experts, hidden, inner] or, turned, the other way."""
    last = [shape for shape in shapes.values() if len(shape) == 3][-1]
    return last[2] if getattr(module, "is_transposed", False) else last[1]


@contextmanager
def _two_experts(module: nn.Module, experts: StackedExperts) -> Generator[None, None, None]:
    before = {name: getattr(module, name) for name in experts.counts}
    for name in before:
        setattr(module, name, 2)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
