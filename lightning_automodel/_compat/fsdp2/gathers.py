"""Lets FSDP2 gather what can be trained also in inference mode, and on CPU receive parameters where they compute.

On CPU: FSDP2 gathers a unit into a buffer, from which it copies each parameter. Of a unit of two, over dp_shard=2::

    stored       GPU 0   a0 b0        GPU 1   a1 b1
    FSDP2        [a0 b0 a1 b1]  ->  a = [a0 a1], b = [b0 b1]
    here                            a = [a0 a1], b = [b0 b1]        a message for each part
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.fsdp2.units import parameter_groups
from lightning_automodel._compat.torch.tensors import without_functorch

Gather = Callable[[list[Tensor], list[Tensor], ProcessGroup], None]
"""gathers inputs [n] of all ranks in outputs [ranks * n], pair by pair"""

Allocating = Callable[[], AbstractContextManager[None]]
"""what is around the allocation of outputs"""


def gather_trainable(unit: FSDPModule) -> None:
    """Make an FSDP2 unit leave ``torch.inference_mode()`` while it gathers.

    It keeps what it has gathered first, and fills it again later. A tensor of inference mode can never be trained.
    """
    for group in parameter_groups(unit):
        if type(group) is FSDPParamGroup:
            group.__class__ = Gathers


def gather_by(unit: FSDPModule, gather: Gather, allocating: Allocating) -> None:
    """Make an FSDP2 unit gather its parameters by ``gather``, which returns when they are there; on CPU only."""
    for group in parameter_groups(unit):
        if getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
            group.__class__ = _GathersInPlace
            group.gather, group.allocating = gather, allocating


def forget_gathered_ahead(units: Iterable[FSDPModule]) -> None:
    """Let FSDP2 units gather anew what they have gathered ahead of passes that never came, as FSDP2 does behind
    backward passes: of a block behind one that was called by itself, or the last. Weights may have changed since.
    """
    for group in (group for unit in units for group in parameter_groups(unit)):
        if (ahead := group._all_gather_result) is None:
            continue
        if ahead.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(ahead.all_gather_event)
        if isinstance(ahead.all_gather_work, Work):
            ahead.all_gather_work.wait()
        group._all_gather_result = None


GATHERED = AllGatherResult(torch.empty(0), None, None, [], [], [])
"""Stands for what FSDP2 has gathered where nothing is left to be waited for."""


def is_to_gather(group: FSDPParamGroup) -> bool:
    """Tell whether a group that is asked for its parameters has none, and needs them."""
    is_needed = group.unshard_in_backward or group._training_state != TrainingState.PRE_BACKWARD
    return is_needed and not group.is_unsharded and group._all_gather_result is None


_SEEN = "_versions_of_shards"


def show_changes(group: FSDPParamGroup) -> None:
    """Let autograd see which shards of a group that is to gather have changed since it gathered last.

    FSDP2 hides from it that memory is filled anew. A backward pass through what a graph computed before a step would
    then compute with the weights behind it, where it is an error of parameters that are whole.
    """
    versions = [held.sharded_param._version for held in group.fsdp_params]
    before = vars(group).get(_SEEN, versions)
    setattr(group, _SEEN, versions)
    if versions == before:
        return
    for held, now, then in zip(group.fsdp_params, versions, before, strict=True):
        whole = getattr(held, "_unsharded_param", None)
        if now != then and whole is not None and not whole.is_inference():
            increment_version([whole, whole._local_tensor] if isinstance(whole, DTensor) else whole)


class Gathers(FSDPParamGroup):
    """Gathers outside of inference mode, and of transforms of torch.func."""

    def unshard(self, async_op: bool = False) -> None:
        if is_to_gather(self):
            show_changes(self)
        with _without_inference(), without_functorch():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with _without_inference(), without_functorch():
            super().wait_for_unshard()


class _GathersInPlace(FSDPParamGroup):
    gather: Gather
    allocating: Allocating

    def unshard(self, async_op: bool = False) -> None:
        """Gather, also where FSDP2 would have it done in the background."""
        if is_to_gather(self):
            show_changes(self)
            with (
                _without_inference(),
                without_functorch(),
                torch.no_grad(),
                record_function(self._with_fqn("FSDP::all_gather")),
            ):
                self._gather()
            self._all_gather_result = GATHERED

    def wait_for_unshard(self) -> None:
        """Compute with what was gathered."""
        if self._all_gather_result is None:
            return
        self._all_gather_result = None
        with _without_inference(), without_functorch():
            for held in self.fsdp_params:
                held.init_unsharded_param()
            self._to_unsharded()

    def _gather(self) -> None:
        ranks = self._all_gather_process_group.size()
        inputs, outputs, columns = [], [], []
        owns = [held.all_gather_inputs for held in self.fsdp_params]
        with self.allocating():
            for held, own in zip(self.fsdp_params, owns, strict=True):
                held.init_all_gather_outputs([x.numel() for x in own], [x.dtype for x in own], ranks, self.device)
                held.alloc_all_gather_outputs()
        for held, own in zip(self.fsdp_params, owns, strict=True):
            whole = held.all_gather_outputs
            if held.fsdp_placement.dim != 0 and held.sharded_state == ShardedState.SHARDED:
                whole = [torch.empty_like(x) for x in whole]
                columns.append((held, whole))
            inputs += own
            outputs += [x.view(part.dtype) for x, part in zip(whole, own, strict=True)]  # torch 2.15: bytes of another
        wholes = [x for held in self.fsdp_params for x in held.all_gather_outputs]
        versions = tuple(x for x in wholes if not x.is_inference())  # which a backward pass compares
        with torch.autograd._unsafe_preserve_version_counter(versions):
            self.gather(outputs, inputs, self._all_gather_process_group)
            for held, gathered in columns:
                _join_columns(held, gathered, ranks)


def _join_columns(held: FSDPParam, gathered: list[Tensor], ranks: int) -> None:
    """Put parts [ranks * rows, columns] of a parameter that is cut in columns beside each other."""
    for parts, whole in zip(gathered, held.all_gather_outputs, strict=True):
        rows, dim = list(held.padded_sharded_param_size), held.fsdp_placement.dim
        joined = [size * ranks if i == dim else size for i, size in enumerate(rows)]
        torch.cat(list(parts.view(ranks, *rows)), dim=dim, out=whole.view(joined))


def _without_inference() -> AbstractContextManager:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
