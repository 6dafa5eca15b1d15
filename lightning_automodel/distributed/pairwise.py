"""All-gather and reduce-scatter over gloo, as messages between pairs of ranks.

Every rank sends straight to every other what that one needs, all at once; gloo's own take longer
(``benchmarks.efficiency`` has both). Reduce-scatter of [4, n], of which rank r keeps row r::

                         rank 0    rank 1    rank 2    rank 3
    to the next          row 1     row 2     row 3     row 0
    to the one after     row 2     row 3     row 0     row 1
    to the one before    row 3     row 0     row 1     row 2
    then the sum of      row 0     row 1     row 2     row 3     its own and three that came, in the order of the ranks

Both are operations of torch's, so that what counts collectives, or profiles them, sees one each.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import custom_op

from lightning_automodel._compat.groups import group_of_name, timeout_of

_TAG = 71  # of these messages, so that no other is taken for one


def goes_over_gloo(group: ProcessGroup) -> bool:
    """Tell whether ``group`` communicates by gloo, and by nothing else."""
    return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Collects ``input`` [n] of every rank in ``output`` [ranks * n], in the order of the ranks.

    Args:
        output: contiguous, on CPU; ``input`` may be this rank's part of it.
        input: contiguous, of equal size on all ranks.
        group: over gloo.
    """
    _all_gather(output, input, group.group_name)


def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Sums ``input`` [ranks * n] over the ranks, of which each keeps its part: ``output`` [n].

    Args:
        output: contiguous, on CPU.
        input: contiguous; stays as it is.
        group: over gloo, of two ranks or more.
    """
    _reduce_scatter(output, input, group.group_name)


@custom_op("lightning_automodel::all_gather", mutates_args={"output"}, device_types="cpu")
def _all_gather(output: Tensor, input: Tensor, group: str) -> None:
    members = group_of_name(group)
    rows = output.view(members.size(), -1)
    exchange([input.view(-1)] * members.size(), list(rows), members)
    if rows[members.rank()].data_ptr() != input.data_ptr():
        rows[members.rank()].copy_(input.view(-1))


@custom_op("lightning_automodel::reduce_scatter", mutates_args={"output"}, device_types="cpu")
def _reduce_scatter(output: Tensor, input: Tensor, group: str) -> None:
    members = group_of_name(group)
    rows, total, own = list(input.view(members.size(), -1)), output.view(-1), members.rank()
    first = 0 if own else 1  # of the others: its row comes to where the sum is to be
    terms = [torch.empty_like(row) if rank not in (own, first) else row for rank, row in enumerate(rows)]
    terms[first] = total
    exchange(rows, terms, members)
    for term in (terms[1 - first], *terms[2:]):
        total.add_(term)


def exchange(sent: list[Tensor], received: list[Tensor], group: ProcessGroup) -> None:
    """Send ``sent[i]`` to rank i and receive ``received[i]`` from it, for all others."""
    rank, ranks = group.rank(), group.size()
    works = []
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        works.append(dist.irecv(received[source], group=group, group_src=source, tag=_TAG))
        works.append(dist.isend(sent[to], group=group, group_dst=to, tag=_TAG))
    timeout = timeout_of(group)  # messages know only the one that the group was made with
    for work in works:
        assert work is not None
        work.wait(timeout)
