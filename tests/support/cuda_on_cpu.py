"""Stands in for the CUDA calls of megatron-fsdp, so that it runs on gloo. One CPU stream does everything in order."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from megatron_fsdp import param_and_grad_buffer
from torch.distributed import distributed_c10d

from lightning_automodel._compat.fake.cuda import CPU, Event, Stream
from lightning_automodel.parallel.megatron_fsdp import device

coalescing_manager = param_and_grad_buffer._coalescing_manager


class _Stream(Stream):
    device = CPU


@contextmanager
def _in_order(group: Any, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
    """Waits for coalesced collectives. The library frees buffers in the order of a stream; gloo's threads know none.

    gloo sends gathers of several dtypes in one buffer of the first one's, which NCCL does not: others go behind them.
    """
    others: list[Any] = []
    with coalescing_manager(group, *args, **kwargs) as manager:
        yield manager
        waiting = distributed_c10d._world.pg_coalesce_state[group]
        first = waiting[0].tensor.dtype if waiting else None
        others += [each for each in waiting if each.dst_tensor is not None and each.tensor.dtype != first]
        waiting[:] = [each for each in waiting if all(each is not other for other in others)]
    manager.wait()
    for each in others:
        reduction = {} if each.redop is None else {"op": each.redop}
        each.op(each.dst_tensor, each.tensor, group=group, **reduction)


@contextmanager
def _stream(stream: Any) -> Generator[None, None, None]:
    yield


def install() -> None:
    """For the rest of this process."""
    device.require_cuda = lambda _: None
    only = _Stream()
    replaced = {
        "current_device": lambda: 0,
        "Stream": _Stream,
        "Event": Event,
        "current_stream": lambda device=None: only,
        "stream": _stream,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    param_and_grad_buffer._coalescing_manager = _in_order
    preprocess = param_and_grad_buffer.gradient_reduce_preprocessing

    def without_nccl(data: Any, factor: Any, config: Any) -> Any:
        config.gradient_reduce_div_fusion = False  # an operation of NCCL alone
        return preprocess(data, factor, config)

    param_and_grad_buffer.gradient_reduce_preprocessing = without_nccl
