"""Frees the gradients of a step before the next forward pass, where nobody could see the difference.

Lightning's loop clears gradients between the forward and the backward pass: those of the step before are held through
forward and loss, where memory peaks. A loop by hand clears them behind its step.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_automodel._compat.lightning.trainer import skips_backward
from lightning_automodel._compat.torch.modules import hooks_of
from lightning_automodel.modules.reachable_code import is_of_library, names_in, objects_of, reachable_code, strings_in

REDUCED_EACH_TIME = "on_after_backward or backward names gradients, so they are reduced at every micro-batch"


class LastGradients:
    """Clears gradients before a training step, where Lightning would clear them behind it."""

    def __init__(self) -> None:
        self.may_go = False

    def start(self, trainer: "pl.Trainer", module: "pl.LightningModule", optimizers: Iterable[Optimizer]) -> None:
        """Decide for a run: they stay where the user's code runs on clearing, or may read gradients in a step."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self.may_go = (
            module.automatic_optimization
            and "dataloader_iter" not in inspect.signature(module.training_step).parameters  # counts batches itself
            and not any(is_overridden(hook, module) for hook in ("on_before_zero_grad", "optimizer_zero_grad"))
            and not any(is_overridden("on_before_zero_grad", callback) for callback in callbacks)
            and all(clears_only(optimizer) for optimizer in optimizers)
            and not may_read_gradients(module, [*callbacks, *optimizers])
        )

    def free(self, trainer: "pl.Trainer", optimizers: Iterable[Optimizer]) -> None:
        """Free the gradients before the first micro-batch of an optimizer step, as Lightning would behind its forward.

        The condition is that of Lightning's loop (``_AutomaticOptimization._make_zero_grad_fn``).
        """
        is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if self.may_go and is_first and not skips_backward(trainer):
            for optimizer in optimizers:
                optimizer.zero_grad()


def clears_only(optimizer: Optimizer) -> bool:
    """Tell whether ``optimizer.zero_grad`` is torch's, which does nothing but clear."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def may_read_gradients(module: "pl.LightningModule", others: Iterable[object] = ()) -> bool:
    """Tell whether code of the user's that a training step may run names gradients of parameters.

    Args:
        module: with modules, objects and functions that it holds.
        others: that it reaches by its trainer; of these only methods that it names run.
    """
    held = list(objects_of([part for module_ in module.modules() for part in (module_, *vars(module_).values())]))
    kinds = {type(thing) for thing in (*held, *others)}
    forwards = [function for part in module.modules() for function in _run_by_call(part)]
    forwards += [thing for thing in held if inspect.isroutine(thing)]
    forwards += [
        vars(kind)[name] for kind in map(type, held) if not is_of_library(kind) for name in _UNNAMED & vars(kind).keys()
    ]
    return _name_gradients([module.training_step, *forwards], kinds)


def read_between_micro_batches(module: "pl.LightningModule", callbacks: Iterable["pl.Callback"]) -> bool:
    """Tell whether a hook that runs behind the backward pass of each micro-batch, or is it, names gradients of
    parameters.
    """
    own: list[Any] = [thing for thing in (module, *callbacks) if is_overridden("on_after_backward", thing)]
    functions = [thing.on_after_backward for thing in own] + [module.backward] * is_overridden("backward", module)
    parts = (part for module_ in module.modules() for part in (module_, *vars(module_).values()))
    kinds = {type(thing) for thing in objects_of([*own, *parts])} if functions else set()
    return _name_gradients(functions, kinds)


def run_before_backward(module: "pl.LightningModule", callbacks: Iterable["pl.Callback"]) -> bool:
    """Tell whether hooks of a user's run between a forward pass and its backward pass, where parameters are copies."""
    of_module = any(is_overridden(hook, module) for hook in ("optimizer_zero_grad", "backward"))
    return of_module or _overridden(("on_before_zero_grad", "on_before_backward"), module, callbacks)


def run_before_steps(module: "pl.LightningModule", callbacks: Iterable["pl.Callback"]) -> bool:
    """Tell whether hooks of a user's run before steps by hand, of whatever model."""
    return _overridden(("on_before_optimizer_step",), module, callbacks)


def _overridden(hooks: Iterable[str], module: "pl.LightningModule", callbacks: Iterable["pl.Callback"]) -> bool:
    return any(is_overridden(hook, thing) for thing in (module, *callbacks) for hook in hooks)


def _name_gradients(functions: Iterable[Callable[..., object]], kinds: Iterable[type]) -> bool:
    return any(
        "grad" in strings_in(code) or any(map(_is_of_gradients, names_in(code)))
        for code in reachable_code(functions, kinds)
    )


_UNNAMED = {"__call__", "__getattr__", "__getitem__", "__iter__", "__enter__", "__exit__"}
"""Methods that run without being named."""


def _run_by_call(part: nn.Module) -> Iterator[Callable[..., object]]:
    if not isinstance(part, torch.jit.ScriptModule):  # its code is no Python
        yield type(part).forward  # behind those of an instance, such as this package's
        yield part.forward
    yield from hooks_of(part)


def _is_of_gradients(name: str) -> bool:
    return name in ("grad", "clip_gradients") or name.startswith("clip_grad") or name.endswith("grad_norm")
