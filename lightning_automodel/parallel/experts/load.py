"""How unevenly tokens are spread over the ranks that compute experts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel.modules.wrappers import name_without_wrappers, unwrapped
from lightning_automodel.parallel.experts import ExpertsOfRank, experts_of_rank


def expert_loads(model: nn.Module) -> dict[str, float]:
    """Measures by how much the busiest rank of a group of ``ep`` exceeded the mean, since it was asked last.

    Nothing is dropped under expert parallelism, so rows are memory and time: with 2.0, one rank holds and computes
    twice its share. Collective over all ranks; waits for the device.

    Args:
        model: or a module that holds it; on every rank.

    Returns:
        by the name of each module of experts the largest number of rows that a rank computed over the mean, between 1.0
        and ``ep``, the worst of all groups; nothing without ``ep``.
    """
    counted: dict[str, ExpertsOfRank] = {}
    for name, module in model.named_modules():
        of_rank = experts_of_rank(module) if unwrapped(module) is module else None
        if of_rank is not None:
            counted[name_without_wrappers(name)] = of_rank
    if not counted:
        return {}
    group, device = next(iter(counted.values())).group, next(model.parameters()).device
    rows = torch.tensor([of_rank.rows for of_rank in counted.values()], dtype=torch.float32, device=device)
    most, total = _reduced(rows, dist.ReduceOp.MAX, group), _reduced(rows, dist.ReduceOp.SUM, group)
    ratios = torch.where(total > 0, most * group.size() / total.clamp(min=1), 1.0)
    for of_rank in counted.values():
        of_rank.rows = 0
    return dict(zip(counted, _reduced(ratios, dist.ReduceOp.MAX, None).tolist(), strict=True))


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    result = values.clone()
    dist.all_reduce(result, operation, group=group)
    return result
