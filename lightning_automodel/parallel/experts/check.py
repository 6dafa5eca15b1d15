"""Asks modules of experts, with numbers, whether rows may be computed apart and weights be applied outside of them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.transformers.models import experts_run_eagerly
from lightning_automodel.distributed.random_numbers import places_of_generators
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.wrappers import unwrapped
from lightning_automodel.parallel.experts.seam import one_expert_per_row
from lightning_automodel.parallel.traces import WithoutDropout, leaving_no_trace
from lightning_automodel.plans.experts import StackedExperts

_TOLERANCE = 1e-4
_EXPERTS, _ROWS, _APART = 2, 16, 4
_OFTEN = 7  # of eight rows go to the first expert, where they go to one


def check_experts(model: nn.Module, found: Iterable[StackedExperts], instead: str) -> None:
    """Check each kind of experts in ``model`` once; what is assigned to ``forward`` makes one of its own.

    Args:
        model: that holds them.
        found: what is known of them.
        instead: what to use if tokens cannot be parted among ranks.

    Raises:
        ValueError: naming a module whose rows cannot be computed apart, and ``instead``.
    """
    modules = [(unwrapped(model.get_submodule(experts.name)), experts) for experts in found]
    for module, experts in {(type(m), code_of(m)): (m, e) for m, e in modules}.values():
        if not _computes_rows_apart(module, experts):
            raise ValueError(
                f"what {experts.name} ({type(module).__name__}) returns is not the sum of what its experts return of "
                "each row alone, times the weights of the routes (it drops rows, mixes them, or weights otherwise), so "
                f"ranks cannot compute rows of each other's tokens; {instead}"
            )


def ignores_zeros(module: nn.Module, experts: StackedExperts) -> bool:
    """Tell whether nothing comes of a row of zeros in a module that sorts its rows, and no gradient: it may stay away.

    Of two experts with random weights, as above.
    """
    generator = torch.Generator().manual_seed(0)
    values = _random_weights(module, experts, generator)
    given = [value.requires_grad_() for value in values.values()]
    with torch.enable_grad(), leaving_no_trace(module), WithoutDropout():
        for name in experts.counts:
            setattr(module, name, _EXPERTS)
        rows = given[0].new_zeros(_ROWS, _width(module, experts, values)).requires_grad_()
        output = functional_call(module, values, (rows,))
        if is_fake(output):
            return False
        drawn = torch.randn(output.shape, generator=generator)
        gradients = torch.autograd.grad(output, [rows, *given], drawn, allow_unused=True)
    return not any(value is not None and value.any() for value in (output, *gradients))


def _random_weights(module: nn.Module, experts: StackedExperts, generator: torch.Generator) -> dict[str, Tensor]:
    shapes = {name: own_parameters(module)[name].shape for name in experts.stacked}  # type: ignore[union-attr]
    return {name: torch.randn((_EXPERTS, *shape[1:]), generator=generator) * 0.02 for name, shape in shapes.items()}


def _computes_rows_apart(module: nn.Module, experts: StackedExperts) -> bool:
    """Compare what two random experts make of random rows with the weighted sum of what each makes of a few of them.

    As in evaluation and as in training, but for dropout; of code that draws otherwise nothing can be told. The weights
    of ``module`` are not looked at, and may be on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    values = _random_weights(module, experts, generator)
    hidden = torch.randn(_ROWS, _width(module, experts, values), generator=generator)
    weights = torch.rand(_ROWS, 2, generator=generator)
    with torch.no_grad(), leaving_no_trace(module), experts_run_eagerly(module), WithoutDropout():
        for name in experts.counts:
            setattr(module, name, _EXPERTS)
        return all(
            _is_sum_of_rows(module.train(training), experts, values, hidden, index, weights[:, : index.shape[1]])
            for training in (False, True)
            for index in _routes(experts)
        )


def _routes(experts: StackedExperts) -> list[Tensor]:
    """List routes of the rows [rows, k], to two experts."""
    rows = torch.arange(_ROWS)
    if experts.sorts_rows:
        return [(rows * _EXPERTS // _ROWS)[:, None]]
    return [torch.stack([rows % 2, 1 - rows % 2], dim=1), (rows % (_OFTEN + 1) == _OFTEN).long()[:, None]]


def _is_sum_of_rows(
    module: nn.Module,
    experts: StackedExperts,
    values: dict[str, Tensor],
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> bool:
    def forward(*inputs: Tensor) -> Tensor:
        return functional_call(module, values, inputs)

    before, run = places_of_generators(), one_expert_per_row(forward, experts, _EXPERTS)
    if experts.sorts_rows:
        weights = torch.ones_like(weights)
    try:
        together = forward(hidden) if experts.sorts_rows else forward(hidden, index, weights)
    except RuntimeError:
        if experts.sorts_rows:  # it reads rows otherwise
            return False
        raise
    if is_fake(together):
        return True
    expected = torch.zeros_like(together)
    for rows in torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0)).split(_APART):
        for route, weight in zip(index[rows].split(1, dim=1), weights[rows].split(1, dim=1), strict=True):
            expected[rows] += run(hidden[rows], route.squeeze(1)) * weight
    error, bound = (together - expected).norm(), _TOLERANCE * expected.norm()
    return places_of_generators() != before or bool(error <= bound)  # of NaN nothing is true


def _width(module: nn.Module, experts: StackedExperts, values: dict[str, Tensor]) -> int:
    """Read the width of the hidden states off the last matrix, [experts, hidden, inner] or, turned, the other way."""
    matrices = [value.shape for value in values.values() if value.ndim == 3]
    first, last = matrices[0], matrices[-1]
    is_turned = getattr(module, "is_transposed", experts.sorts_rows and first[1] == last[2])  # as products of batches
    return last[2] if is_turned else last[1]
