"""Sends tokens to the ranks that compute their experts, and brings the results back.

Four tokens with two experts each on one of two ranks (ep=2); the other rank does the same with its own::

    routes            0:a 0:c   1:a 1:b   2:d 2:b   3:c 3:d        token:expert
    sorted by owner   0:a 1:a 1:b 2:b | 0:c 3:c 2:d 3:d            rank 0 computes a, b; rank 1 computes c, d
    sent              4 rows to rank 0, 4 rows to rank 1           what arrives is sorted by sender, then by expert
    computed          one expert per row, with weight 1
    sent back         4 rows from rank 0, 4 rows from rank 1
    in tokens' order  0:a 0:c   1:a 1:b   2:d 2:b   3:c 3:d
    weighted, summed  0         1         2         3              by the rank that has the token

Weights stay with the sender: an expert's code needs no other number of experts than its own, and no mark for rows that
are not for it. Nothing is dropped and nothing is added up out of order, so equal runs give equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.collectives import exchange_rows, scale_gradient

Rows = Callable[[Tensor, Tensor], Tensor]
"""``(rows [n, hidden], index of the expert of each [n])`` to what the experts make of them [n, hidden]."""


Dispatcher = Callable[[Tensor, Tensor, Tensor, Rows, Tensor, ProcessGroup], Tensor]
"""``(hidden [..., width], index [tokens, k], weights [tokens, k], rows, places [experts], group)`` to a tensor like
``hidden``: for each token, the sum by ``weights`` of what its experts make of it, wherever ``places`` says they are.
It is differentiable in ``hidden`` and ``weights``, and calls ``rows`` on every rank, also where no token came."""


@dataclass(frozen=True)
class Routes:
    """Where the rows of one call go.

    Attributes:
        order: the routes, sorted by owner and expert: int64 [tokens * k].
        sent: rows to each rank.
        received: rows from each rank.
        experts: the local expert of each row that arrives: int64 [sum(received)].
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor


def find_routes(index: Tensor, places: Tensor, group: ProcessGroup) -> Routes:
    """Agree with the other ranks on who sends how many rows to whom. The one wait for the device.

    Args:
        index: the experts of each token: [tokens, k].
        places: ``owner * local + index at the owner`` of each expert.
        group: the ranks that exchange tokens.
    """
    ranks, local = group.size(), len(places) // group.size()
    place = places[index.reshape(-1)]
    order = place.argsort(stable=True)
    counts = torch.zeros_like(places).index_add_(0, place, torch.ones_like(place)).view(ranks, local)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    owned = torch.arange(local, device=index.device).repeat(ranks)
    experts = owned.repeat_interleave(arriving.flatten(), output_size=sum(received))
    return Routes(order, sent, received, experts)


def dispatch(hidden: Tensor, weights: Tensor, run: Rows, routes: Routes, group: ProcessGroup) -> Tensor:
    """Give each token to its experts, wherever they are, and sum what they return by ``weights``. Collective.

    Args:
        hidden: the tokens of this rank, [..., hidden].
        weights: of their experts, [tokens, k].
        run: the experts of this rank.
        routes: of :func:`find_routes`.
        group: the ranks that exchange tokens.

    Returns:
        a tensor like ``hidden``.
    """
    tokens, k = hidden.reshape(-1, hidden.shape[-1]), weights.shape[-1]
    rows = exchange_rows(tokens[routes.order // k], routes.sent, routes.received, group)
    back = exchange_rows(_run(run, rows, routes.experts), routes.received, routes.sent, group)
    in_order = torch.empty_like(back).index_copy(0, routes.order, back)
    *batch, width = hidden.shape
    weighted = in_order.view(*batch, k, width) * weights.reshape(*batch, k, 1)
    return weighted.sum(-2).to(hidden.dtype)  # no view: models write into what experts return


def select(hidden: Tensor, index: Tensor, weights: Tensor, run: Rows, places: Tensor, rank: int, ranks: int) -> Tensor:
    """Sum by ``weights`` what the experts of this rank return, of tokens that all ranks have: a partial sum.

    Args:
        hidden: tokens, [..., hidden].
        index: their experts, [tokens, k].
        weights: of these experts, [tokens, k].
        run: the experts of this rank.
        places: of :class:`~lightning_automodel.plans.experts.Owners`.
        rank: of this process, of ``ranks`` among which the experts are divided.
    """
    tokens, k, local = hidden.reshape(-1, hidden.shape[-1]), index.shape[-1], len(places) // ranks
    place = places[index.reshape(-1)]
    mine = (place // local == rank).nonzero().flatten()
    mine = mine[place[mine].argsort(stable=True)]
    results = _run(run, tokens[mine // k], place[mine] - rank * local) * weights.reshape(-1)[mine].unsqueeze(-1)
    routes = results.new_zeros(len(place), hidden.shape[-1]).index_copy(0, mine, results)
    return routes.view(*hidden.shape[:-1], k, hidden.shape[-1]).sum(-2).to(hidden.dtype)


def _run(run: Rows, rows: Tensor, experts: Tensor) -> Tensor:
    """Run a row of ones where none came: its gradients are zeros, and all ranks reduce and exchange alike.

    Of zeros some experts make NaN, such as those that divide by the norm of a row.
    """
    if len(rows):
        return run(rows, experts)
    row = rows.new_ones(1, rows.shape[1]) + rows.sum(0, keepdim=True)
    return run(row, experts.new_zeros(1))[:0]


def sharing_gradients(run: Rows, ranks: int) -> Rows:
    """Divide the gradients of experts by the number of ``ranks`` whose tokens they sum, and no other gradient.

    FSDP2 divides by the ranks that it reduces over only.
    """
    return lambda rows, experts: scale_gradient(run(scale_gradient(rows, ranks), experts), 1 / ranks)
