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

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import custom_op

from lightning_automodel._compat.groups import group_of_name, timeout_of

_TAG = 71  # of the first message to a rank and upward, so that no other is taken for one


def goes_over_gloo(group: ProcessGroup) -> bool:
    """Tell whether ``group`` communicates by gloo, and by nothing else."""
    return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}


def all_gather(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup) -> None:
    """Collects each of ``inputs`` [n] of every rank in that of ``outputs`` [ranks * n], in the order of the ranks.

    Args:
        outputs: contiguous, on CPU; an input may be this rank's part of its output.
        inputs: contiguous, of equal sizes on all ranks.
        group: over gloo.
    """
    _all_gather(outputs, inputs, group.group_name)


def reduce_scatter(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Sums ``input`` [ranks * n] over the ranks, of which each keeps its part: ``output`` [n].

    Args:
        output: contiguous, on CPU.
        input: contiguous; stays as it is.
        group: over gloo, of two ranks or more.
    """
    _reduce_scatter(output, input, group.group_name)


@custom_op("lightning_automodel::all_gather", mutates_args={"outputs"}, device_types="cpu")
def _all_gather(outputs: list[Tensor], inputs: list[Tensor], group: str) -> None:
    members = group_of_name(group)
    rows = [output.view(members.size(), -1) for output in outputs]
    exchange([inputs] * members.size(), list(zip(*rows, strict=True)), members)
    for row, own in zip((whole[members.rank()] for whole in rows), inputs, strict=True):
        if row.data_ptr() != own.data_ptr():
            row.copy_(own)


@custom_op("lightning_automodel::reduce_scatter", mutates_args={"output"}, device_types="cpu")
def _reduce_scatter(output: Tensor, input: Tensor, group: str) -> None:
    members = group_of_name(group)
    rows, total, own = list(input.view(members.size(), -1)), output.view(-1), members.rank()
    first = 0 if own else 1  # of the others: its row comes to where the sum is to be
    terms = [torch.empty_like(row) if rank not in (own, first) else row for rank, row in enumerate(rows)]
    terms[first] = total
    exchange([[row] for row in rows], [[term] for term in terms], members)
    for term in (terms[1 - first], *terms[2:]):
        total.add_(term)


def exchange(sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: ProcessGroup) -> None:
    """Send all of ``sent[i]`` to rank i and receive all of ``received[i]`` from it, for all others."""
    rank, ranks = group.rank(), group.size()
    works = []
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        works += [group.recv([tensor], source, _TAG + i) for i, tensor in enumerate(received[source])]
        works += [group.send([tensor], to, _TAG + i) for i, tensor in enumerate(sent[to])]
    timeout = timeout_of(group)  # messages know only the one that the group was made with
    for work in works:
        work.wait(timeout)
