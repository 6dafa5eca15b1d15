"""Asks modules of experts, with numbers, whether rows may be computed apart and weights be applied outside of them."""

from collections.abc import Iterable
from functools import partial

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
_SMALL = 0.02
_OF_MODULES = vars(nn.Module()).keys()
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
                "each row alone, times the weights of the routes (it drops rows, mixes them, weights otherwise, or "
                f"chooses experts itself), so ranks cannot compute rows of each other's tokens; {instead}"
            )


def ignoring_zeros(model: nn.Module, found: Iterable[StackedExperts]) -> set[str]:
    """Name the modules of ``found`` that sort their rows and ignore those of zeros; equal modules are asked once."""
    answers: dict[tuple, bool] = {}
    ignoring = set()
    for experts in found:
        if not experts.sorts_rows:
            continue
        module = unwrapped(model.get_submodule(experts.name))
        kind = (*_kind(module), *(parameter.shape for parameter in module.parameters()))
        if kind not in answers:
            answers[kind] = ignores_zeros(module, experts)
        if answers[kind]:
            ignoring.add(experts.name)
    return ignoring


def _kind(module: nn.Module) -> tuple:
    """Make what is equal for modules that compute alike, but for their parameters."""
    settings = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
    plain = {key: value if isinstance(value, int | float | str) else id(value) for key, value in settings.items()}
    buffers = tuple(id(buffer) for buffer in module.buffers(recurse=False))
    children = tuple(_kind(child) for child in module.children())
    return type(module), code_of(module), tuple(plain.items()), buffers, children


def ignores_zeros(module: nn.Module, experts: StackedExperts) -> bool:
    """Tell whether nothing comes of a row of zeros in a module that sorts its rows, and no gradient: it may stay away.

    Of two experts with random weights, as above, and with large ones, which pass thresholds that small ones do not.
    """
    values = _random_weights(module, experts, torch.Generator().manual_seed(0))
    with torch.enable_grad(), leaving_no_trace(module), WithoutDropout():
        for name in experts.counts:
            setattr(module, name, _EXPERTS)
        if not _makes_nothing_of_zeros(module.eval(), experts, values):
            return False
        large = {name: value.detach() / _SMALL for name, value in values.items()}
        return _makes_nothing_of_zeros(module.train(), experts, large)


def _makes_nothing_of_zeros(module: nn.Module, experts: StackedExperts, values: dict[str, Tensor]) -> bool:
    given = [value.requires_grad_() for value in values.values()]
    rows = given[0].new_zeros(_ROWS, _width(module, experts, values)).requires_grad_()
    output = _call(module, values, rows.clone())  # which code may write into
    if is_fake(output):
        return False
    gradients: tuple[Tensor | None, ...] = ()
    if output.requires_grad:
        drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(output, [rows, *given], drawn, allow_unused=True)
    return not any(value is not None and value.any() for value in (output, *gradients))


def _random_weights(module: nn.Module, experts: StackedExperts, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw the weights of two experts, and what all experts share (a norm behind each)."""
    shapes = {name: own_parameters(module)[name].shape for name in experts.stacked}  # type: ignore[union-attr]
    shapes = {name: (_EXPERTS, *shape[1:]) for name, shape in shapes.items()}
    shapes |= {name: p.shape for name, p in module.named_parameters() if name not in shapes}
    return {name: torch.randn(shape, generator=generator) * _SMALL for name, shape in shapes.items()}


def _computes_rows_apart(module: nn.Module, experts: StackedExperts) -> bool:
    """Compare what two random experts make of random rows with the weighted sum of what each makes of a few of them.

    As in evaluation and as in training, but for dropout; of code that draws otherwise nothing can be told. The weights
    of ``module`` are not looked at, and may be on the meta device.
    """
    generator = torch.Generator().manual_seed(0)
    values = _random_weights(module, experts, generator)
    with torch.no_grad(), leaving_no_trace(module), experts_run_eagerly(module), WithoutDropout():
        for name in experts.counts:
            setattr(module, name, _EXPERTS)
        hidden = torch.randn(_ROWS, _width(module, experts, values), generator=generator)
        weights = torch.rand(_ROWS, 2, generator=generator)
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
    forward = partial(_call, module, values)
    before, run = places_of_generators(), one_expert_per_row(forward, experts, _EXPERTS)
    try:
        together = forward(hidden) if experts.sorts_rows else forward(hidden, index, weights)
    except Exception:
        if experts.sorts_rows:  # it reads rows otherwise
            return False
        raise
    if is_fake(together) or (experts.sorts_rows and places_of_generators() != before):
        return True
    if experts.sorts_rows:
        weights = torch.ones_like(weights)
        if not module.training and not _uses_the_expert_of_each_row(module, values, hidden, together, index):
            return False
    expected = torch.zeros_like(together)
    for rows in torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0)).split(_APART):
        for route, weight in zip(index[rows].split(1, dim=1), weights[rows].split(1, dim=1), strict=True):
            expected[rows] += run(hidden[rows], route.squeeze(1)) * weight
    error, bound = (together - expected).norm(), _TOLERANCE * expected.norm()
    return places_of_generators() != before or bool(error <= bound)  # of NaN nothing is true


def _call(module: nn.Module, values: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    return functional_call(module, values, inputs)


def _uses_the_expert_of_each_row(
    module: nn.Module, values: dict[str, Tensor], hidden: Tensor, together: Tensor, index: Tensor
) -> bool:
    """Tell whether rows follow the weights of the expert in whose place they lie, and no others: nobody routes inside.

    Where both experts have the weights of one, its rows stay as they are, and at least half of the others do not.

    Args:
        module: that sorts its rows.
        values: its weights.
        hidden: rows of its experts.
        together: what it makes of them.
        index: the expert of each row, [rows, 1].
    """
    if together.shape != hidden.shape:
        return False
    for expert in range(_EXPERTS):
        of_one = {name: value[[expert] * _EXPERTS] for name, value in values.items()}
        change = (_call(module, of_one, hidden) - together).norm(dim=-1)
        changed, others = change > _TOLERANCE * together.norm(dim=-1), index.squeeze(1) != expert
        if changed[~others].any() or (together.any() and changed[others].sum() < others.sum() / 2):
            return False
    return True


def _width(module: nn.Module, experts: StackedExperts, values: dict[str, Tensor]) -> int:
    """Read the width of the hidden states off the last matrix, [experts, hidden, inner] or, turned, the other way.

    Of sorted rows it is one of both that ``module`` takes.
    """
    last = [value.shape for value in values.values() if value.ndim == 3][-1]
    if not experts.sorts_rows:
        return last[2] if getattr(module, "is_transposed", False) else last[1]
    return last[2] if _takes_rows(module, values, last[2]) else last[1]


def _takes_rows(module: nn.Module, values: dict[str, Tensor], width: int) -> bool:
    rows = next(iter(values.values())).new_zeros(_ROWS, width)
    try:
        with torch.no_grad():
            return _call(module, values, rows).shape == rows.shape
    except Exception:
        return False
