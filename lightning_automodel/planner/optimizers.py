"""Makes the optimizer that a run names, as ``CausalLM`` takes it from YAML or from the command line."""

import inspect
import json
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from jsonargparse import auto_cli
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer

from lightning_automodel.finetuning.causal_lm import CausalLM

MakesOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]


def optimizer_of(told: str | Mapping[str, Any] | None) -> MakesOptimizer:
    """Return what makes an optimizer of parameters.

    Args:
        told: path or name of a class, or ``{"class_path": ..., "init_args": ...}``; ``None``: what ``CausalLM`` makes.

    Raises:
        ValueError: if there is no such class, or it has no such arguments.
    """
    if told is None:
        default: MakesOptimizer = inspect.signature(CausalLM).parameters["optimizer"].default
        return default
    chosen = {"class_path": told} if isinstance(told, str) else dict(told)
    name = chosen.get("class_path")
    if name in torch.optim.__all__:  # other packages use the same names
        chosen["class_path"] = f"torch.optim.{name}"
    try:
        found: MakesOptimizer = auto_cli(_chosen, args=[f"--optimizer={json.dumps(chosen)}"], exit_on_error=False)
    except ArgumentError as error:
        reason = " ".join(str(error).split()).partition(". Got value")[0]
        raise ValueError(f"optimizer={told!r}: {reason}") from None
    return found


def _chosen(optimizer: OptimizerCallable | None = None) -> OptimizerCallable | None:
    return optimizer
