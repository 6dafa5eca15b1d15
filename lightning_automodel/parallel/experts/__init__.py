"""Expert parallelism: ranks with different samples compute different experts, and tokens travel to them.

Who gathers changes, and not who stores: each rank keeps the experts that FSDP2 gives it without ``ep``, so checkpoints,
clipping and optimizers see nothing new. Eight experts, dp_shard=4, ep=2::

                   GPU 0        GPU 1        GPU 2        GPU 3
    stores         0-1          2-3          4-5          6-7          also without ep
    gathers        from 2       from 3       from 0       from 1       the experts of its ep rank, over efsdp
    computes       0-1, 4-5     2-3, 6-7     0-1, 4-5     2-3, 6-7
    tokens         <- all-to-all ->          <- all-to-all ->          rows of ``parallel/experts/dispatch.py``
    gradient       to 0 and 2   to 1 and 3   to 0 and 2   to 1 and 3   reduce-scatter over efsdp

tp stays inside of each expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import dtensor_from
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.distributed.logs import log
from lightning_automodel.mesh import ExpertAxes
from lightning_automodel.modules.forward import SharedByCopies, wrap_forward
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import unwrapped
from lightning_automodel.parallel.experts.adapters import take_factors
from lightning_automodel.parallel.experts.check import check_experts, ignoring_zeros
from lightning_automodel.parallel.experts.dispatch import (
    Dispatcher,
    Routes,
    Rows,
    dispatch,
    find_routes,
    sharing_gradients,
)
from lightning_automodel.parallel.experts.seam import mark_as_seam, one_expert_per_row, only_rows_that_count, routed
from lightning_automodel.plans.experts import Owners, StackedExperts, find_experts

_OF_RANK = "_experts_of_this_rank"


@dataclass
class ExpertsOfRank(SharedByCopies):
    """What a module of experts notes of itself, once it holds those of one rank.

    Attributes:
        number: of experts in all.
        stacked: the parameters that hold them.
        group: the ranks that exchange tokens.
        rows: that this rank computed since the number was read.
    """

    number: int
    stacked: tuple[str, ...]
    group: ProcessGroup
    rows: int = 0


@dataclass(frozen=True)
class ExpertParallel:
    """The experts of a model, before and after each rank has its own.

    Attributes:
        axes: over which tokens travel, and experts are sharded.
        found: the modules of experts by name.
        ignoring: those of them to which rows of zeros need not travel.
    """

    axes: ExpertAxes
    found: dict[str, StackedExperts]
    ignoring: set[str]

    @classmethod
    def of(cls, model: nn.Module, axes: ExpertAxes) -> "ExpertParallel | None":
        """Find and check the experts of ``model``, of which no parameter was touched yet; ``None`` if it has none.

        Raises:
            ValueError: if tokens cannot travel to them, with the reason and the way out.
        """
        found = find_experts(model, axes.shards, axes.ep.size())
        check_experts(model, found.values(), "use ep=1, where FSDP2 gathers the experts")
        return cls(axes, found, ignoring_zeros(model, found.values())) if found else None

    def divide(self, model: nn.Module, dispatcher: Dispatcher | None = None) -> None:
        """Leave each rank the experts that it computes, and let tokens travel to them; in place, values by slices.

        Args:
            model: whose experts were found.
            dispatcher: brings them there; ``None``: torch's all-to-all.
        """
        group = self.axes.ep.get_group()
        for experts in self.found.values():
            owners = Owners(experts.number, group.size(), self.axes.shards // group.size())
            outermost = model.get_submodule(experts.name)
            module, mine = unwrapped(outermost), owners.of_rank(group.rank())
            take_factors(outermost, owners, group.rank())
            for name in experts.stacked:
                _take(module, name, mine, f"{experts.name}.{name}")
            for name in experts.counts:
                setattr(module, name, owners.local)
            of_rank = ExpertsOfRank(experts.number, experts.stacked, group)
            vars(module)[_OF_RANK] = of_rank
            ignores_zeros = experts.name in self.ignoring
            wrap_forward(module, _Travel(experts, ignores_zeros, owners.places(), of_rank, dispatcher))
            mark_as_seam(module)
        log(
            f"{class_names(model)[0]}: ep={group.size()} lets tokens travel to the experts of {len(self.found)} "
            f"modules, of which {self.axes.shards // group.size()} ranks share the storage"
        )


def experts_of_rank(module: nn.Module) -> ExpertsOfRank | None:
    """Tell what ``module``, or the layer in it if it is a wrapper, holds of the experts; ``None``: it has none."""
    return vars(unwrapped(module)).get(_OF_RANK)


def _take(module: nn.Module, name: str, mine: Tensor, full_name: str) -> None:
    parameter = own_parameters(module)[name]
    assert parameter is not None
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise ValueError(f"{full_name} is stored in {parameter.dtype}, which ep does not divide yet; use ep=1")
    new = nn.Parameter(_rows(parameter.detach(), mine, full_name), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    own_parameters(module)[name] = new


def _rows(value: Tensor, mine: Tensor, name: str) -> Tensor:
    if not isinstance(value, DTensor):
        return value[mine]
    if any(placement.is_shard(0) for placement in value.placements):
        raise ValueError(
            f"the tensor-parallel plan splits the experts in {name} themselves over tp, and ep does so too; use ep=1, "
            "or a plan that splits each expert"
        )
    shape = torch.Size((len(mine), *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_from(value.to_local()[mine], value.device_mesh, tuple(value.placements), shape, stride)


class _Travel(SharedByCopies):
    """Replaces what experts do with the tokens of one rank by what they do with those of all ranks of a group."""

    def __init__(
        self,
        experts: StackedExperts,
        ignores_zeros: bool,
        places: Tensor,
        of_rank: ExpertsOfRank,
        dispatcher: Dispatcher | None,
    ) -> None:
        self._experts, self._ignores_zeros, self._places = experts, ignores_zeros, places
        self._of_rank, self._dispatcher = of_rank, dispatcher

    @torch.compiler.disable
    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        hidden, index, weights = routed(module, self._experts, args, kwargs)
        self._places, group = self._places.to(index.device), self._of_rank.group
        run = one_expert_per_row(forward, self._experts, self._experts.number // group.size())
        travel = partial(self._travel, sharing_gradients(run, group.size()))
        return (only_rows_that_count(travel) if self._ignores_zeros else travel)(hidden, index, weights)

    def _travel(self, run: Rows, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        group = self._of_rank.group
        if self._dispatcher is not None:
            return self._dispatcher(hidden, index, weights, self._counting(run), self._places, group)
        routes = find_routes(index, self._places, group)
        self._of_rank.rows += sum(routes.received)
        try:
            return dispatch(hidden, weights, run, routes, group)
        except torch.OutOfMemoryError as error:
            error.add_note(_why_so_many(self._experts.name, routes))
            raise

    def _counting(self, run: Rows) -> Rows:
        def counting(rows: Tensor, experts: Tensor) -> Tensor:
            self._of_rank.rows += len(rows)
            return run(rows, experts)

        return counting


def _why_so_many(name: str, routes: Routes) -> str:
    received, sent = sum(routes.received), sum(routes.sent)
    return (
        f"{name}: tokens of other ranks came to this one: {received} rows, {received / max(sent, 1):.1f} times as many "
        "as it sent. Nothing is dropped, so an uneven router costs memory; use activation checkpointing, a smaller "
        "micro-batch, a larger auxiliary loss of the router, or a smaller ep"
    )
