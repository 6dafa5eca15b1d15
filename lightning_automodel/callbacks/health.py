"""Watches whether a run is healthy: gradients, replicas, and ranks that all others wait for."""

import dataclasses
from statistics import median_low
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_automodel.callbacks.clock import FetchListener
from lightning_automodel.callbacks.sample import StepProfile
from lightning_automodel.callbacks.steps import StepCounter, is_time_to_log
from lightning_automodel.distributed.logs import logger, warn_once
from lightning_automodel.gradients import clip_grad_norm_, total_norm
from lightning_automodel.strategies.precision import FSDP2Precision


class Health(Callback):
    """Logs the norm of the gradients, and sets and completes what the strategies check.

    ``train/gradient_norm`` is the norm of all gradients before clipping, over all ranks: what clipping has computed, or
    computed every ``log_every_n_steps`` steps. Of Lightning's strategies one device and DDP have it, without clipping.

    Args:
        nonfinite: what happens before a step whose loss or gradients are not finite: "error", "skip" or "ignore", in
            the place of the strategy's own field; ``None``: as that says.
        check_replicas_every_n_steps: replaces the strategy's own field, too.
        slow_rank_every_n_steps: one step in so many is profiled on every rank. What a rank does not spend waiting for
            collectives is its own time; ``train/slowest_rank`` is the largest over the median, and a rank over
            ``slow_rank_factor`` is named in a warning. ``None``: never; the step takes longer.
        slow_rank_factor: from where on a rank is slow.

    Raises:
        ValueError: in ``setup``, if the strategy has no such field.
    """

    def __init__(
        self,
        nonfinite: str | None = None,
        check_replicas_every_n_steps: int | None = None,
        slow_rank_every_n_steps: int | None = None,
        slow_rank_factor: float = 1.5,
    ) -> None:
        super().__init__()
        given = {"nonfinite": nonfinite, "check_replicas_every_n_steps": check_replicas_every_n_steps}
        self._switches = {name: value for name, value in given.items() if value is not None}
        self._slow_every, self._slow_factor = slow_rank_every_n_steps, slow_rank_factor
        self._steps, self._listener = StepCounter(), FetchListener(self._on_fetch)
        self._profile: StepProfile | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Sets the fields of the strategy, before it reads them."""
        strategy: Any = trainer.strategy
        config = getattr(strategy, "config", None)
        if not self._switches or stage != "fit":
            return
        if not dataclasses.is_dataclass(config) or not isinstance(trainer.precision_plugin, FSDP2Precision):
            warn_once(f"Health({', '.join(self._switches)}) is ignored: {type(strategy).__name__} does not check that")
            return
        known = {field.name for field in dataclasses.fields(config)}
        if unknown := sorted(self._switches.keys() - known):
            raise ValueError(
                f"Health({', '.join(unknown)}): {type(strategy).__name__} has no such switch; leave it out, or use "
                f"{type(config).__name__}(check_for_nan_in_grad=True)"
            )
        strategy.config = dataclasses.replace(config, **self._switches)  # type: ignore[type-var]

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begins to count steps."""
        self._trainer = trainer
        self._steps.start(trainer)
        if self._slow_every:
            self._listener.install(trainer)

    def _on_fetch(self) -> None:
        if self._profile is None and self._slow_every and (self._trainer.global_step + 1) % self._slow_every == 0:
            self._profile = StepProfile.begin()

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        """Logs the norm, and compares the ranks, when it is time."""
        if not self._steps.has_stepped(trainer):
            return
        if self._slow_every and trainer.global_step % self._slow_every == 0:
            self._compare_ranks(trainer, pl_module)
        if is_time_to_log(trainer) and (norm := gradient_norm(trainer)) is not None:
            pl_module.log("train/gradient_norm", norm)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Leaves the trainer as it was."""
        self._listener.remove(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Leaves the trainer as it was."""
        StepProfile.abandon()
        self._listener.remove(trainer)

    def _compare_ranks(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Gather what each rank needed by itself, and name those that the others wait for. Collective."""
        sample, self._profile = self._profile.end() if self._profile is not None else None, None
        times: list[float | None] = [None if sample is None else sample.all - sample.waited]
        if trainer.world_size > 1 and dist.is_initialized():
            own, times = times[0], [None] * trainer.world_size
            dist.all_gather_object(times, own)
        known = {rank: time for rank, time in enumerate(times) if time is not None}
        if not known:
            return
        middle = median_low(known.values())
        module.log("train/slowest_rank", max(known.values()) / middle)
        slow = [f"{rank} ({time:.3f} s)" for rank, time in known.items() if time > self._slow_factor * middle]
        if slow and trainer.is_global_zero:
            logger.warning(
                "step %d: all wait for rank %s; the median of %d ranks needs %.3f s by itself",
                trainer.global_step,
                ", ".join(slow),
                len(known),
                middle,
            )


def gradient_norm(trainer: "pl.Trainer") -> Tensor | None:
    """Compute, or find, the norm of the gradients of the step that has just ended; ``None``: it is not known."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, FSDP2Precision):
        is_known = plugin.clip_norm is clip_grad_norm_  # others take the gradients away
    else:
        is_known = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
    if trainer.gradient_clip_val:
        return plugin.norm if isinstance(plugin, FSDP2Precision) else None
    parameters = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return total_norm(gradients) if is_known and gradients else None
