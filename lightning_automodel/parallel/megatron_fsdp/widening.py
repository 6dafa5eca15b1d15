"""Keeps the digits of frozen parameters that compute in a narrower dtype, as Megatron-FSDP does for what trains.

A base below adapters, a teacher, an average of weights: checkpoints and exports hold what was read, and small changes
that a hook makes (``average.lerp_(weight, 0.001)``) add up, as they do in the float32 shards of FSDP2.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.dtensor.tensors import dtensor_like, writes_into
from lightning_automodel._compat.megatron_fsdp import exchange_parameters_of_optimizer
from lightning_automodel.gradients import to_local_if_dtensor


class Widened:
    """One frozen parameter, as it is seen and as it computes.

    Args:
        parameter: with this rank's shard in the wide dtype.
        computing: where the library has the same shard in the dtype of compute.
    """

    def __init__(self, parameter: nn.Parameter, computing: Tensor) -> None:
        self._parameter, self._computing = parameter, computing
        self._writes: int | None = None

    def install(self) -> None:
        """Let what computes follow, unless nobody wrote into the parameter since."""
        writes = writes_into(self._parameter)
        if writes != self._writes:
            self._computing.copy_(to_local_if_dtensor(self._parameter.detach()))
            self._writes = writes


def widen_frozen(wrapper: Any, names: Container[str], dtype: torch.dtype) -> list[Widened]:
    """Put shards of ``dtype`` in the place of those that are seen of frozen parameters, outside of passes.

    Args:
        wrapper: the library's.
        names: of parameters that were rounded.
        dtype: in which the optimizer has what trains.

    Returns:
        one for each of them.
    """
    narrow = {
        name: parameter
        for name, parameter in wrapper.param_and_grad_buffer.optimizer_named_parameters
        if name in names and not parameter.requires_grad
    }
    computing = {name: to_local_if_dtensor(parameter.detach()) for name, parameter in narrow.items()}
    wide = {
        name: nn.Parameter(dtensor_like(computing[name].to(dtype), parameter), requires_grad=False)
        for name, parameter in narrow.items()
    }
    exchange_parameters_of_optimizer(wrapper, wide)
    return [Widened(wide[name], computing[name]) for name in narrow]
