"""Gives the forward passes of a model random numbers of their own, apart from the user's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from lightning_automodel.distributed.random_numbers import RandomNumbers, drawing_from, place_of_users
from lightning_automodel.modules.chosen import skips_layers
from lightning_automodel.modules.forward import wrap_forward

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NUMBERS = "_random_numbers"
_running: list[nn.Module] = []


def draw_from(module: nn.Module, numbers: RandomNumbers) -> None:
    """Make each forward pass of ``module`` draw from ``numbers`` from now on, beside the user's generators.

    A pass inside of another one goes on with the draws of that one.
    """
    is_new = _NUMBERS not in module.__dict__
    module.__dict__[_NUMBERS] = numbers
    if is_new:
        wrap_forward(module, _pass(skips_layers(module)))


def random_numbers_of(module: nn.Module) -> RandomNumbers:
    """Return the random numbers that the passes of ``module`` draw from.

    Raises:
        KeyError: if :func:`draw_from` was not called with it.
    """
    return module.__dict__[_NUMBERS]


def data_rank_of(mesh: DeviceMesh) -> int:
    """Return this rank's place among those that see different samples.

    Args:
        mesh: of one axis, or two, replicas first.
    """
    place = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or [0] * mesh.ndim, strict=True):
        place = place * size + coordinate
    return place


def lone_dropouts(root: nn.Module, submodels: list[nn.Module]) -> Iterator[nn.Module]:
    """Returns the dropout modules below ``root`` that none of ``submodels`` holds."""
    held = {id(module) for submodel in submodels for module in submodel.modules()}
    yield from (m for m in root.modules() if isinstance(m, DROPOUTS) and id(m) not in held)


def _pass(skips: bool) -> Callable[..., Any]:
    def around(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if _running:
            return forward(*args, **kwargs)
        numbers, begins_at = random_numbers_of(module), place_of_users()
        seeds = numbers.next_pass(module.training, begins_at)
        with ExitStack() as stack:
            _running.append(module)
            stack.callback(_running.pop)
            has_drawn = stack.enter_context(drawing_from(seeds))
            if skips:
                stack.enter_context(_Decisions(seeds.common))
            output = forward(*args, **kwargs)
            drew = has_drawn() or (skips and module.training)
        if drew:
            numbers.go_on(begins_at, seeds)
        return output

    return around


class _Decisions(TorchFunctionMode):
    """Draws a single number (``torch.rand([])``) for all data ranks alike, within this context.

    It decides whether a layer is skipped. Ranks that skip different layers would wait for each other's shards.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args in (([],), ((),)):
            return torch.rand((), generator=self._generator)
        return func(*args, **(kwargs or {}))
