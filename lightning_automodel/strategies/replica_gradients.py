"""Averages gradients over replicas where torch's wrapper would not, or not in float32."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average the gradients with which ``parameters`` wait for an optimizer step, if they have any. Collective.

    torch's wrapper would do so in the last micro-batch of the step, for which it does not know them. What was averaged
    before stays what it is.
    """
    if not parameters:
        return
    found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for parameter, is_waiting in zip(parameters, found.tolist(), strict=True):
        if is_waiting:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).div(dist.get_world_size())
            dist.all_reduce(wide)
            parameter.grad = wide.to(gradient.dtype)


def reduce_in_float32(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages narrow gradients in float32, as FSDP2 does: a communication hook.

    Args:
        bucket: gradients of one dtype.
    """
    narrow = bucket.buffer()
    wide = narrow.to(torch.promote_types(narrow.dtype, torch.float32)).div_(dist.get_world_size())
    future = dist.all_reduce(wide, async_op=True).get_future()
    return future.then(lambda done: narrow.copy_(done.value()[0]))
