"""Compiled passes over logits, whole or in chunks: what several kernels do through a float32 array is two readings.

::

    eager:     logits -> shifted (float32) -> exp -> sum        exp -> probabilities -> gradient (float32) -> logits
    compiled:  logits -> sum of exp                             logits -> gradient, over the logits
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_automodel._compat.fake.shapes import tensors_are_fake
from lightning_automodel.config import StageSwitches
from lightning_automodel.distributed.logs import warn_once


@dataclass(frozen=True)
class Passes:
    """What ``torch.compile`` makes of the two; shared by all models that are compiled alike.

    Attributes:
        add_up: :func:`_add_up`.
        write_gradient: :func:`_write_gradient`.
    """

    add_up: Callable[..., tuple[Tensor, Tensor | None]]
    write_gradient: Callable[..., None]

    @property
    def fail(self) -> bool:
        """Tell whether one of them could not be compiled, though nobody had asked for it."""
        return any(isinstance(each, _UnlessItFails) and each.fails for each in (self.add_up, self.write_gradient))


def passes_for(config: StageSwitches, device_type: str) -> Passes | None:
    """Choose the passes of a model's loss: compiled where its blocks are, and on CUDA; ``None``: kernel by kernel.

    On CUDA blocks that run eagerly have compiled passes too, as other libraries have kernels of their own for them:
    over 8192 x 128,256 logits they take 4 ms where torch's own kernels for cross entropy take 13.
    """
    if config.enable_compile:
        return compiled_passes(config.compile_backend, config.compile_dynamic)
    if device_type == "cuda" and torch.cuda.is_available() and not tensors_are_fake():
        return _passes_that_may_fail()
    return None


@cache
def compiled_passes(backend: str, dynamic: bool | None) -> Passes:
    """Compile the passes; ``backend`` and ``dynamic`` as for blocks."""
    options: dict[str, Any] = dict(backend=backend, dynamic=dynamic)
    return Passes(torch.compile(_add_up, **options), torch.compile(_write_gradient, **options))


@cache
def _passes_that_may_fail() -> Passes:
    return Passes(_UnlessItFails(_add_up), _UnlessItFails(_write_gradient))


class _UnlessItFails:
    """Runs a function compiled. Where nothing can be compiled its first call runs as it is, and should be the last."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._compiled = function, torch.compile(function)
        self.fails = False

    def __call__(self, *args: Any) -> Any:
        try:
            return self._compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers have no class of errors in common
            self.fails = True
            warn_once(_cannot_compile(error))
        return self._function(*args)


def _cannot_compile(error: Exception) -> str:
    what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return (
        f"the loss runs kernel by kernel, which takes longer: torch.compile failed ({what}); it wants triton, which "
        "torch for CUDA brings, and a C compiler such as gcc"
    )


def _add_up(logits: Tensor, maximum: Tensor, smoothed: bool) -> tuple[Tensor, Tensor | None]:
    """Sum exponentials of ``logits - maximum`` over each row, and the differences themselves if the loss is
    ``smoothed``: [rows].
    """
    shifted = logits - maximum[:, None]
    return shifted.exp().sum(-1), shifted.sum(-1) if smoothed else None


def _write_gradient(
    logits: Tensor, maximum: Tensor, scale: Tensor, spread: Tensor | None, columns: Tensor, target: Tensor, out: Tensor
) -> None:
    """Write ``exp(logits - maximum) * scale - spread``, less ``target`` in each row's column, to ``out``.

    ``out`` may be ``logits``. All others are [rows].
    """
    values = (logits - maximum[:, None]).exp() * scale[:, None]
    if spread is not None:
        values = values - spread[:, None]
    is_target = torch.arange(logits.shape[-1], device=logits.device)[None] == columns[:, None]
    out.copy_(torch.where(is_target, values - target[:, None], values))
