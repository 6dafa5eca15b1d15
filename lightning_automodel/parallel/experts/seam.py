"""Where tokens meet their experts: the call of a module of experts, whose rows a graph cannot count."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel.parallel.experts.dispatch import Rows
from lightning_automodel.plans.experts import StackedExperts

_IS_SEAM = "_chooses_rows_for_its_experts"


def mark_as_seam(module: nn.Module) -> None:
    """Note that ``module`` chooses the rows that its experts compute, by their values."""
    vars(module)[_IS_SEAM] = True


def holds_seam(module: nn.Module) -> bool:
    """Tell whether ``module`` or a module in it chooses rows by their values."""
    return any(_IS_SEAM in vars(part) for part in module.modules())


def is_seam(module: nn.Module) -> bool:
    """Tell whether ``module`` itself does."""
    return _IS_SEAM in vars(module)


def routed(
    module: nn.Module, experts: StackedExperts, args: tuple, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Read hidden states, indices and weights off a call of a module of experts, however they are passed.

    Where it is given sorted rows, each is one of a token of its own that goes to one expert.
    """
    names = _names_of_inputs(type(module).forward)
    if len(args) > len(names) or kwargs.keys() - set(names):
        raise TypeError(
            f"{experts.name} ({type(module).__name__}) is called with {len(args)} inputs and {sorted(kwargs)}, and ep "
            f"gives its experts {', '.join(names)} alone; use ep=1"
        )
    given = dict(zip(names, args, strict=False)) | kwargs
    if experts.sorts_rows:
        hidden = given[names[0]]
        owners = torch.arange(experts.number, device=hidden.device)
        index = owners.repeat_interleave(hidden[..., 0].numel() // experts.number).unsqueeze(1)
        return hidden, index, torch.ones_like(index, dtype=hidden.dtype)
    hidden, index, weights = (given[name] for name in names)
    return hidden, index, weights


@cache
def _names_of_inputs(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def only_rows_that_count(travel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Change ``travel``, of rows that go to one expert each: those of zeros, of which nothing comes, stay away."""

    def among(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        counting = rows.any(-1).nonzero().flatten()
        back = travel(rows[counting], index[counting], weights[counting])
        return torch.zeros_like(rows).index_copy(0, counting, back).view_as(hidden)

    return among


def one_expert_per_row(forward: Callable[..., Any], experts: StackedExperts, number: int) -> Rows:
    """Make the function that runs each row through one expert, of ``number`` experts in a module like ``experts``."""
    if experts.sorts_rows:
        return partial(_sorted_rows, forward, number)
    return lambda rows, expert: forward(rows, expert.unsqueeze(1), rows.new_ones(len(rows), 1))


def _sorted_rows(forward: Callable[..., Any], number: int, rows: Tensor, expert: Tensor) -> Tensor:
    """Give each of ``number`` experts as many rows, the last ones copies, and take what it makes of ``rows``.

    Copies of a row make no NaN where rows make none; zeros may, and times the gradient of what is not taken it stays.
    """
    if is_fake(rows):
        return forward(rows)
    counts = torch.bincount(expert, minlength=number)
    order, most = expert.argsort(stable=True), int(counts.max())
    first = (counts.cumsum(0) - counts)[expert[order]]
    place = torch.empty_like(expert)
    place[order] = expert[order] * most + torch.arange(len(expert), device=expert.device) - first
    filled = rows[:1].detach().repeat(number * most, 1).index_copy(0, place, rows)
    return forward(filled)[place]
