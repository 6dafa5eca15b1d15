"""Ends a run, or leaves a step out, where losses or gradients are NaN or infinite, before the weights change; and ends
it where ranks gathered different layers, train different parameters, or have different learning rates.

One vector says which gradients are not finite. All ranks agree on it, so that all do the same, and read it before the
step, which costs nothing on CPU. A fused optimizer on an accelerator reads it there, and leaves its step out; the host
looks one step later at a copy that came meanwhile, and waits for nothing::

    backward k -> vector k -> step k, left out if vector k says so -> backward k + 1 -> host reads copy of vector k
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel._compat.lightning.trainer import end_search_of_rate
from lightning_automodel._compat.torch.optimization import leaves_steps_out
from lightning_automodel._compat.torch.tensors import each_norm
from lightning_automodel.distributed.arriving import Arriving
from lightning_automodel.distributed.logs import logger
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.parallel.guards.gather_order import Gathered, take_gathers

_MOST_LOSSES = 1024
_LOW = 1e-30  # in the place of a rate of 0


@dataclass(frozen=True)
class Finding:
    """Which losses and gradients before one step are not finite.

    Attributes:
        step: of the trainer.
        module: whose parameters the optimizer has.
        parameters: of the optimizer.
        vector: [parameters + 1], 1 where a gradient is not finite on any rank; the last one is about the losses.
        losses: of this rank's micro-batches.
        gathered: by this rank before the step.
        rates: of this rank, by group of the optimizer.
        differs: [3], 1 if other ranks gathered other layers, or in another order; if they reduced gradients of other
            parameters; and if they have other rates.
    """

    step: int
    module: "pl.LightningModule"
    parameters: list[Tensor]
    vector: Tensor
    losses: list[Tensor]
    gathered: Gathered
    rates: list[float]
    differs: Tensor

    def prevents(self) -> Tensor:
        """Tell what a fused optimizer looks at: more than 0 if the step is not to be taken."""
        return torch.maximum(self.vector.amax(), self.differs.amax())

    def is_fine(self) -> bool:
        """Tell whether all are finite, and all ranks alike. Waits for the device."""
        return not self.prevents()

    def compare_order(self) -> str | None:
        """Say where ranks first gathered different layers; ``None`` if they did not. Collective."""
        if not self.differs[0]:
            return None
        names = {part: name for name, part in self.module.named_modules()}
        mine = [names.get(layer) or type(layer).__name__ for layer in self.gathered.layers]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        for calls in zip_longest(*found, fillvalue="nothing more"):
            if len(set(calls)) > 1:
                return ", ".join(f"rank {rank} called {name}" for rank, name in enumerate(calls))
        return "the first difference is no longer known"

    def compare_reduced(self) -> str | None:
        """Say of which parameters ranks first reduced gradients as if they were of the same ones; ``None`` if they did
        not. Collective.
        """
        if not self.differs[1]:
            return None
        found: list[list[list[str]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, [self._names_of(parameters) for parameters in self.gathered.reduced])
        for of_ranks in zip_longest(*found, fillvalue=[]):
            alike = set.intersection(*map(set, of_ranks))
            apart = [next((name for name in names if name not in alike), None) for names in of_ranks]
            if any(apart):
                return ", ".join(f"rank {rank} trains {name}" for rank, name in enumerate(apart) if name)
        return "the first difference is no longer known"

    def compare_rates(self) -> str | None:
        """Say which group has different learning rates; ``None`` if none has. Collective."""
        if not self.differs[2]:
            return None
        found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, self.rates)
        group, rates = max(enumerate(zip(*found, strict=True)), key=lambda item: max(item[1]) / (min(item[1]) or _LOW))
        each = ", ".join(f"{rate:g} on rank {rank}" for rank, rate in enumerate(rates))
        return f"the learning rate of group {group} is {each}"

    def describe(self) -> str:
        """Name the step, the first micro-batch and the first parameter that is not finite. Collective."""
        bad = [i for i, loss in enumerate(self.losses) if not torch.isfinite(loss).all()]
        mine = (bad[0], float(self.losses[bad[0]])) if bad else None
        found: list[Any] = [mine]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        where = [
            f"the loss of micro-batch {at[0]} of rank {rank} is {at[1]}"
            for rank, at in enumerate(found)
            if at is not None
        ]
        names = self._names_of([p for p, flag in zip(self.parameters, self.vector.tolist(), strict=False) if flag])
        parts = where[:1] or ["all losses are finite"]
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"the gradient of {names[0]}{others} is not")
        return f"optimizer step {self.step}: {', '.join(parts)}"

    def _names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.module.named_parameters()}
        return [names.get(parameter, "a parameter that the module does not hold") for parameter in parameters]


class FiniteGuard:
    """Checks losses and gradients between backward pass and step.

    Args:
        policy: "error", "skip" or "ignore" (``FSDP2Config.nonfinite``).
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._losses: deque[Tensor] = deque(maxlen=_MOST_LOSSES)  # steps past Lightning never take them
        self._waiting: tuple[Finding, Arriving] | None = None

    def record(self, loss: Tensor) -> None:
        """Keeps the loss of a micro-batch until the step."""
        if self.policy != "ignore":
            self._losses.append(loss.detach())

    def checked(
        self, closure: Callable[[], Any], optimizer: Optimizer, module: "pl.LightningModule"
    ) -> Callable[[], Any]:
        """Wrap ``closure`` so that gradients are checked after it."""
        if self.policy == "ignore":
            return closure

        def run() -> Any:
            result = closure()
            self.allows(self.inspect(optimizer, module))
            return result

        return run

    @torch.no_grad()  # what a DTensor holds is then given as it is, without an autograd function for each
    def inspect(self, optimizer: Optimizer, module: "pl.LightningModule") -> Finding:
        """Check the gradients that ``optimizer`` would use. Collective; no host synchronization."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        losses, device = list(self._losses), parameters[0].device if parameters else module.device
        self._losses.clear()
        gathered = take_gathers()
        rates = _rates(optimizer)
        alike = (gathered.digest, gathered.digest_reduced, sum(math.log(rate or _LOW) for rate in rates))
        signed = [torch.full((1,), float(sign * number), device=device) for sign in (1, -1) for number in alike]
        found = _agreed(torch.cat([_not_finite(parameters, device), _any_not_finite(losses, device), *signed]))
        vector, largest, smallest = found[:-6], found[-6:-3], -found[-3:]
        # Digests differ by 1 at least; rates by 0.1 %, which is more than the rounding of what ranks compute alike.
        differs = (largest - smallest > 1e-3).float()
        return Finding(module.trainer.global_step, module, parameters, vector, losses, gathered, rates, differs)

    def allows(self, finding: Finding) -> bool:
        """Tells whether the step is to be taken.

        Raises:
            RuntimeError: on all ranks, if it is not and that is an error.
        """
        if finding.is_fine():
            return True
        self._report(finding)
        return False

    def defer(self, finding: Finding, optimizer: Optimizer) -> None:
        """Lets a fused optimizer leave its step out, and looks at what the step before has found."""
        self.settle()
        prevents = finding.prevents()
        optimizer.found_inf = prevents  # type: ignore[attr-defined]
        self._waiting = finding, Arriving(prevents)

    def settle(self) -> None:
        """Check what the last step has found, if nobody has."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting[1].read():
            self._report(waiting[0])

    def _report(self, finding: Finding) -> None:
        if (order := finding.compare_order()) is not None:
            raise RuntimeError(
                f"optimizer step {finding.step}: {order}; ranks that share shards have to call the same layers in the "
                "same order, since each call gathers them. Put layers that samples choose into one nn.Module whose "
                "forward chooses, and which all ranks call; or call those that a batch does not need as well, and add "
                "0 * output.sum() to the loss; or use DDPStrategy with DDPConfig(find_unused_parameters=True)"
            )
        if (reduced := finding.compare_reduced()) is not None:
            raise RuntimeError(
                f"optimizer step {finding.step}: {reduced}, and not all ranks do; requires_grad has to be the same on "
                "all ranks, since gradients are summed in one buffer. Let all that the samples choose among require a "
                "gradient on every rank, such as adapters behind set_adapter of peft (parameter.requires_grad_(True) "
                "for each): what no rank has used gets none; or choose the same on all ranks"
            )
        if (rates := finding.compare_rates()) is not None:
            raise RuntimeError(
                f"optimizer step {finding.step}: {rates}; all ranks have to take the same step. Log what a scheduler "
                "monitors with self.log(..., sync_dist=True), and what sets a rate by hand reduce with "
                "self.trainer.strategy.reduce(value)"
            )
        if self.policy == "skip":
            logger.warning("%s; the step is left out", finding.describe())
            return
        if end_search_of_rate(finding.module.trainer):
            logger.warning("%s; the search of a learning rate ends here", finding.describe())
            return
        raise RuntimeError(
            f"{finding.describe()}; the weights are those before this step. Look for the cause (a learning rate, a "
            'sample, a division), or use nonfinite="skip" in the config of the strategy to leave such steps out, or '
            '"ignore"'
        )


def can_defer(optimizer: Optimizer) -> bool:
    """Tells whether ``optimizer`` leaves a step out by itself, on a device for which the host should not wait."""
    devices = (p.device.type for group in optimizer.param_groups for p in group["params"])
    return next(devices, "cpu") != "cpu" and leaves_steps_out(optimizer)


def _rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates that are numbers; reading a tensor would wait for its device."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [abs(float(rate)) for rate in rates if isinstance(rate, int | float)]


def _not_finite(parameters: list[Tensor], device: torch.device) -> Tensor:
    """Mark gradients that are not finite on this rank: [parameters], 0 or 1."""
    locals_ = {i: to_local_if_dtensor(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
    filled = {i: g for i, g in locals_.items() if g.numel()}
    if not filled:
        return torch.zeros(len(parameters), device=device)
    flags = (~_all_finite(list(filled.values()))).float()
    if len(filled) == len(parameters):
        return flags
    # Stacked, because indices would be copied to the device, and the host would wait.
    by_place, none = dict(zip(filled, flags.unbind(), strict=True)), torch.zeros((), device=flags.device)
    return torch.stack([by_place.get(i, none) for i in range(len(parameters))])


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """Tell of each tensor whether it has finite elements only: [tensors], of bool. Squares of these may overflow."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        norms = each_norm(tensors, torch.inf)
        alike = len({norm.dtype for norm in norms}) == 1  # a float64 may be infinite in float32
        return torch.isfinite(torch.stack(norms)) if alike else torch.stack([torch.isfinite(norm) for norm in norms])
    # On CPU a largest norm takes 20 times as long as the two extremes, and these 1.6 times as long as squares.
    finite = torch.isfinite(torch.stack(each_norm(tensors, 2)))
    if finite.all():
        return finite
    reals = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    extremes = [extreme for tensor in reals for extreme in torch.aminmax(tensor)]  # stack widens to the widest
    return torch.isfinite(torch.stack(extremes)).view(-1, 2).all(1)


def _any_not_finite(losses: list[Tensor], device: torch.device) -> Tensor:
    flags = [(~torch.isfinite(loss)).any().to(device) for loss in losses]
    return torch.stack(flags).any().float().view(1) if flags else torch.zeros(1, device=device)


def _agreed(vector: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(vector, dist.ReduceOp.MAX)
    return vector
