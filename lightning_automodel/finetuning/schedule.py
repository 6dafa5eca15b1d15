"""The default learning-rate schedule: linear warmup, then a cosine down to a share of the peak."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupCosine(LRScheduler):
    """Rises linearly over the first steps, then follows half a cosine. Stepped once per optimizer step.

    Args:
        optimizer: its learning rates are the peak.
        warmup: a share of all steps if below 1, else a number of steps.
        final: share of the peak that is left at the end.
        total_steps: optimizer steps of the whole run; ``None`` lets :class:`CausalLM` fill in the trainer's estimate.
            Give it when a run is stopped early and resumed: the schedule should not end with the first part.

    Raises:
        ValueError: if ``warmup``, ``final`` or ``total_steps`` is out of range.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.03, final: float = 0.1, total_steps: int | None = None
    ) -> None:
        if warmup < 0:
            raise ValueError(f"WarmupCosine(warmup={warmup}) must be 0 or more: a share below 1, or a number of steps")
        if not 0 <= final <= 1:
            raise ValueError(f"WarmupCosine(final={final}) must be between 0 and 1, a share of the peak")
        self.warmup = warmup
        self.final = final
        self.total_steps = None if total_steps is None else _checked(total_steps)
        super().__init__(optimizer)

    def set_total_steps(self, total_steps: float) -> None:
        """Stretches the schedule over ``total_steps`` optimizer steps.

        Raises:
            ValueError: if that is not a positive, finite number.
        """
        self.total_steps = _checked(total_steps)
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[Any]:
        """Computes the learning rate of each parameter group now."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, step: int) -> float:
        """Computes the share of the peak learning rate in optimizer step ``step``, counted from 0."""
        if self.total_steps is None:
            return 1.0
        warmup = self.warmup if self.warmup >= 1 else math.ceil(self.warmup * self.total_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1.0, self.total_steps - warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position only: how long the run is belongs to the run that resumes."""
        return {key: value for key, value in super().state_dict().items() if key != "total_steps"}


def _checked(total_steps: float) -> int:
    if not 0 < total_steps < math.inf:
        raise ValueError(
            f"WarmupCosine(total_steps={total_steps}) needs a run that ends; set max_steps or max_epochs of the "
            "trainer, or total_steps"
        )
    return int(total_steps)
