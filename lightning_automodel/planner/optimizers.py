"""Makes the optimizer that a run names, as ``CausalLM`` takes it from YAML or from the command line."""

import json
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from jsonargparse import auto_cli
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import AdamW, Optimizer

MakesOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make what ``CausalLM`` makes where nothing is told: one call, no temporaries."""
    return AdamW(parameters, fused=True)


def optimizer_of(told: str | Mapping[str, Any] | None) -> MakesOptimizer:
    """Return what makes an optimizer of parameters; it goes to other processes, too.

    Args:
        told: path or name of a class, or ``{"class_path": ..., "init_args": ...}``; ``None``: :func:`adamw`.

    Raises:
        ValueError: if there is no such class, or it has no such arguments.
    """
    if told is None:
        return adamw
    text = json.dumps(as_in_files(told))
    try:
        _parsed(text)
    except ArgumentError as error:
        reason = " ".join(str(error).split()).partition(". Got value")[0]
        raise ValueError(f"optimizer={told!r}: {reason}") from None
    return partial(_make, text)


def as_in_files(told: str | Mapping[str, Any]) -> dict[str, Any]:
    """Write an optimizer as a file of a run has it: short names mean torch's, which other packages use, too."""
    chosen = {"class_path": told} if isinstance(told, str) else dict(told)
    name = chosen.get("class_path")
    return {**chosen, "class_path": f"torch.optim.{name}"} if name in torch.optim.__all__ else chosen


def _make(text: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return _parsed(text)(parameters)


@cache
def _parsed(text: str) -> MakesOptimizer:
    found: MakesOptimizer = auto_cli(_chosen, args=[f"--optimizer={text}"], exit_on_error=False)
    return found


def _chosen(optimizer: OptimizerCallable | None = None) -> OptimizerCallable | None:
    return optimizer
