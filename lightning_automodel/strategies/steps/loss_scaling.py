"""Loss scaling for float16: gradients that overflow on any rank are skipped by all."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel._compat.torch.optimization import GradScaler
from lightning_automodel.gradients import to_local_if_dtensor


class AgreedGradScaler(GradScaler):
    """torch's ``GradScaler`` for gradients that are spread over ranks.

    The scale changes between an optimizer's step and the next backward pass only, so that several optimizers can step
    on gradients of one backward pass.
    """

    def __init__(self, device: str, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._unscaled: set[int] = set()
        self._outdated = False

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, with the scale that the last steps led to."""
        self.settle()
        return super().scale(outputs)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, once per step. Collective over all ranks."""
        if id(optimizer) not in self._unscaled:
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes the step, or none if a gradient of any rank is not finite."""
        self.unscale_(optimizer)
        self._unscaled.discard(id(optimizer))
        self._outdated = True
        return super().step(optimizer, *args, **kwargs)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Tells whether the gradients of ``optimizer`` were divided by the scale, and wait for its step."""
        return id(optimizer) in self._unscaled

    def settle(self) -> None:
        """Grows or backs off the scale after steps; nothing if there was none."""
        if self._outdated:
            self._outdated = False
            self.update()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the scale for the next backward pass, and when it grows."""
        self.settle()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with a scale, also where gradients wait for a step and no loss comes before it."""
        super().scale(torch.ones((), device=self._device))  # torch makes what holds the scale with the first loss
        super().load_state_dict(state_dict)

    @override
    def unscale(self, optimizer: Any, inverse: Tensor, found: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        """Divides each rank's part of the gradients; all ranks agree whether any overflowed. Collective."""
        # torch's own ShardedGradScaler overrides this too, but neither knows DTensors.
        by_device = super().unscale(_local_view(optimizer), inverse, found, allow_fp16)
        agreed = torch.stack([value.to(found.device) for value in [found, *by_device.values()]]).amax()
        if dist.is_initialized():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return {found.device: agreed}


def _local_view(optimizer: Optimizer) -> SimpleNamespace:
    """Makes what unscaling reads of an optimizer, with this rank's part of each gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return SimpleNamespace(param_groups=[{"params": [_local(p) for p in parameters]}])


def _local(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    local = to_local_if_dtensor(parameter.detach())
    assert parameter.grad is not None
    local.grad = to_local_if_dtensor(parameter.grad)
    return local
