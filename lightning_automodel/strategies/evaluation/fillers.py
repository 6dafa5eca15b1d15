"""Repeats a step whose collectives other ranks need, and removes every trace of it."""

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_automodel._compat.lightning.evaluation_loops import METRIC_CACHE, EvaluationLoop, discarded_logs
from lightning_automodel._compat.lightning.modules import call_strategy_hook

DEPTH = 2  # of containers in containers: `self.outputs[dataloader_idx].append(...)`


def run_filler(
    trainer: "pl.Trainer", loop: EvaluationLoop, step: str, arguments: tuple[Any, ...], dataloader_idx: int | None
) -> None:
    """Run a step again without a trace.

    Undone are: logged values, states of metrics, attributes of the LightningModule (values, containers, tensors) and
    random states. Not undone is what a step does outside of these, such as writing a file.

    Args:
        trainer: during an evaluation.
        loop: the trainer's loop that runs.
        step: name of the strategy's hook, such as ``validation_step``.
        arguments: of the step: batch, batch index, perhaps loader index.
        dataloader_idx: as Lightning logs under it; ``None`` for a single loader.
    """
    module = trainer.lightning_module
    batch = fresh_containers(arguments[0])
    with isolate_rng(), discarded_logs(trainer, loop, batch, dataloader_idx), preserved_attributes(module):
        call_strategy_hook(trainer, step, batch, *arguments[1:])


def fresh_containers(batch: Any) -> Any:
    """Puts the same tensors into new containers: a step may take its batch apart."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


@contextmanager
def preserved_attributes(module: nn.Module) -> Generator[None, None, None]:
    """Restores the attributes of ``module``, its own buffers, and the states of all metrics below it."""
    modules = [module, *(m for m in module.modules() if isinstance(m, Metric) and m is not module)]
    restores = [_remember_attributes(m) for m in modules]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _remember_attributes(module: nn.Module) -> Callable[[], None]:
    attributes = vars(module)
    saved = dict(attributes)
    tensors = [*attributes.values(), *module.buffers(recurse=False)]
    restores = [_remember_tensor(value) for value in tensors if isinstance(value, Tensor)]
    restores += [_remember_container(value, DEPTH) for value in attributes.values()]

    def restore() -> None:
        # A metric that other ranks update in this round reduces anew on every rank, or on none.
        updated = {key: None for key in (METRIC_CACHE,) if attributes.get(key, ...) is None}
        attributes.clear()
        attributes.update(saved | updated)
        for each in restores:
            each()

    return restore


def _remember_tensor(tensor: Tensor) -> Callable[[], None]:
    saved = tensor.detach().clone()
    return lambda: tensor.detach().copy_(saved)  # type: ignore[return-value]


def _remember_container(value: Any, depth: int) -> Callable[[], None]:
    if depth == 0 or not isinstance(value, dict | list | set | deque):
        return _nothing
    saved = value.copy()
    children = list(value.values()) if isinstance(value, dict) else list(value)
    restores = [_remember_container(child, depth - 1) for child in children]

    def restore() -> None:
        value.clear()
        value.update(saved) if isinstance(value, dict | set) else value.extend(saved)
        for each in restores:
            each()

    return restore


def _nothing() -> None:
    pass
