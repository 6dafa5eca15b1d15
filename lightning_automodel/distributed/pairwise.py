"""All-gather and reduce-scatter over gloo, as messages between pairs of ranks.

Every rank sends straight to every other what that one needs, of all tensors at once, and goes on with a tensor that has
come while others are on their way; gloo's own take longer (``benchmarks.efficiency`` has both). Reduce-scatter of
[4, n], of which rank r keeps row r::

                         rank 0    rank 1    rank 2    rank 3
    to the next          row 1     row 2     row 3     row 0
    to the one after     row 2     row 3     row 0     row 1
    to the one before    row 3     row 0     row 1     row 2
    then the sum of      row 0     row 1     row 2     row 3     its own and three that came, in the order of the ranks

Both are operations of torch's, so that what counts collectives, or profiles them, sees one each.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.library import custom_op

from lightning_automodel._compat.torch.groups import group_of_name, timeout_of

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


def reduce_scatter(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup, mean: bool = False) -> None:
    """Sums each of ``inputs`` [rows, ...] over the ranks, of which each keeps its part of the rows, as torch.chunk has.

    Args:
        outputs: contiguous, on CPU, of the sizes of this rank's parts, which may be empty.
        inputs: contiguous, of equal sizes on all ranks; stay as they are.
        group: over gloo, of two ranks or more.
        mean: divide the sums by the ranks.
    """
    _reduce_scatter(outputs, inputs, mean, group.group_name)


@custom_op("lightning_automodel::all_gather", mutates_args={"outputs"}, device_types="cpu")
def _all_gather(outputs: list[Tensor], inputs: list[Tensor], group: str) -> None:
    members = group_of_name(group)
    rows = list(zip(*(output.view(members.size(), -1) for output in outputs), strict=True))  # by rank

    def put_own(i: int) -> None:
        row = rows[members.rank()][i]
        if row.data_ptr() != inputs[i].data_ptr():
            row.copy_(inputs[i])

    exchange([inputs] * members.size(), rows, members, put_own)


@custom_op("lightning_automodel::reduce_scatter", mutates_args={"outputs"}, device_types="cpu")
def _reduce_scatter(outputs: list[Tensor], inputs: list[Tensor], mean: bool, group: str) -> None:
    members = group_of_name(group)
    own, ranks = members.rank(), members.size()
    parts = list(zip(*(_parts(whole, ranks) for whole in inputs), strict=True))  # by rank
    first = 0 if own else 1  # of the others: its part comes to where the sum is to be
    terms = [[torch.empty_like(x) for x in parts[own]] if rank not in (own, first) else [] for rank in range(ranks)]
    terms[own], terms[first] = list(parts[own]), [x.view(-1) for x in outputs]

    def add(i: int) -> None:
        total = terms[first][i]
        for rank in (1 - first, *range(2, ranks)):
            total.add_(terms[rank][i].view(-1))
        if mean:
            total.div_(ranks)

    exchange(parts, terms, members, add)


def _parts(whole: Tensor, ranks: int) -> list[Tensor]:
    rows = -(-len(whole) // ranks)
    return [whole[i * rows : (i + 1) * rows] for i in range(ranks)]


def exchange(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    group: ProcessGroup,
    arrived: Callable[[int], None],
) -> None:
    """Send all of ``sent[i]`` to rank i and receive all of ``received[i]`` from it, for all others.

    Args:
        sent: of each rank as many tensors as of every other; what is for this rank stays.
        received: as many, contiguous.
        group: over gloo.
        arrived: called with the number of a tensor as soon as it has come from all, while others are on their way.
    """
    rank, ranks = group.rank(), group.size()
    receiving: list[list[Work]] = [[] for _ in sent[rank]]
    sending: list[Work] = []
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        for i, tensor in enumerate(received[source]):
            receiving[i].append(group.recv([tensor], source, _TAG + i))
        sending += [group.send([tensor], to, _TAG + i) for i, tensor in enumerate(sent[to])]
    timeout = timeout_of(group)  # messages know only the one that the group was made with
    for i, works in enumerate(receiving):
        for work in works:
            work.wait(timeout)
        arrived(i)
    for work in sending:
        work.wait(timeout)
