"""Compiles each block of a model, in place: one compilation serves all blocks that are alike.

::

    hooks: FSDP2 gathers, local tensors come in --> compiled(checkpointed(the block's forward)) --> hooks
"""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel._compat.torch.compilation import (
    allow_records_in_checkpoints,
    finds_prepended_hooks,
    overlap_in_compiled_graphs,
)
from lightning_automodel._compat.torch.modules import lay_hooks_in_order
from lightning_automodel._compat.transformers.models import (
    recording_inside_graph,
    recordings_of_call,
    set_test_of_packing,
)
from lightning_automodel.distributed.logs import log, warn_once
from lightning_automodel.modules.caches import (
    caches_by_name,
    has_cache,
    leave_out_cache,
    refuse_left_out,
    taking_caches,
)
from lightning_automodel.modules.forward import named_arguments, wrap_forward
from lightning_automodel.modules.kept_states import has_been_watched, may_keep_something
from lightning_automodel.modules.structure import CONTAINERS, class_names, find_blocks
from lightning_automodel.parallel.activation_checkpointing.blocks import is_checkpointed
from lightning_automodel.parallel.experts.seam import holds_seam, is_seam
from lightning_automodel.parallel.tensor.partial_sums import is_followed
from lightning_automodel.parallel.tensor.sliced_draws import draws_in_slices
from lightning_automodel.parallel.tensor.written_inputs import writes_into_inputs

_CACHE_IS_ASKED_FOR: ContextVar[bool] = ContextVar("cache_is_asked_for", default=False)
"""Whether a user gave the pass that runs a cache, or asked for one."""


def apply_compile(model: nn.Module, *, backend: str = "inductor", dynamic: bool | None = None) -> None:
    """Compiles all blocks of ``model``; to be called after :func:`apply_activation_checkpointing`.

    Raises:
        ValueError: if ``model`` has no blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ValueError(f"enable_compile=True compiles repeated blocks, and {type(model).__name__} has none")
    compile_blocks(blocks.values(), backend=backend, dynamic=dynamic)
    for holder in taking_caches(model):
        wrap_forward(holder, _heeding_caches)
    log(f"{type(model).__name__}: {len(blocks)} blocks are compiled ({backend}, dynamic={dynamic})")


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str = "inductor", dynamic: bool | None = None) -> None:
    """Compiles ``blocks`` with ``torch.compile``, in place; names and checkpoints stay as they are.

    Collectives of tensor parallelism are part of the graph; what FSDP2 does stands around it. In training no cache of
    keys and values is kept, unless a user gives or asks for one; calls with such a cache, and those of evaluation,
    where it grows with every token, run uncompiled.

    Args:
        blocks: that share a compilation where they are alike.
        backend: of ``torch.compile``.
        dynamic: ``True``: one graph for all lengths. ``False``: a graph per length. ``None``: for the first length, and
            then one for all.
    """
    allow_records_in_checkpoints()
    compiled = _CompiledForward(backend, dynamic)
    for block in blocks:
        for module in () if finds_prepended_hooks() else block.modules():
            lay_hooks_in_order(module)
        for part in _parts_in_graphs(block):
            wrap_forward(part, compiled if part is block else _Part(compiled, block))


def _parts_in_graphs(block: nn.Module) -> list[nn.Module]:
    """List what of ``block`` can be a graph: all of it, unless a rank computes some of its experts. Then it is what
    stands beside these, the outermost modules; how many rows they compute is known at run time only.
    """
    if not holds_seam(block):
        return [block]
    if is_seam(block):
        return []
    found = [part for child in block.children() for part in _parts_in_graphs(child)]
    return [part for part in found if not isinstance(part, CONTAINERS) and next(part.parameters(), None) is not None]


@dataclass(frozen=True)
class _Part:
    """Runs a part of a block in a graph, where the block would."""

    compiled: "_CompiledForward"
    block: nn.Module

    def __call__(self, part: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.compiled.run(self.block, False, forward, args, kwargs)


class _CompiledForward:
    """Run the forward passes of blocks in graphs that they share, or uncompiled where a graph would be wrong.

    Half of a checkpointed block cannot fall back to eager, since the recomputation would lack what hooks put in place:
    such a block is one graph, or none.
    """

    def __init__(self, backend: str, dynamic: bool | None) -> None:
        self._compiled = {
            whole: torch.compile(_run, backend=backend, dynamic=dynamic, fullgraph=whole) for whole in (False, True)
        }

    def __call__(self, block: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.run(block, is_checkpointed(block), forward, args, kwargs)

    def run(self, block: nn.Module, whole: bool, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``forward``, of ``block`` or of a part of it, in one graph (``whole``) or in several."""
        if _is_eager(block) or (whole and _keeps_something(block)):
            return forward(*args, **kwargs)
        args, kwargs = caches_by_name(block, args, kwargs)
        if block.training and not _CACHE_IS_ASKED_FOR.get():
            kwargs = leave_out_cache(kwargs)
        elif has_cache(kwargs):
            return forward(*args, **kwargs)
        recordings = recordings_of_call()
        if whole and recordings:
            warn_once(_cannot_record(block, recordings))
            return forward(*args, **kwargs)
        output, recorded = self._compiled[whole](forward, tuple(recordings), args, kwargs)
        for key, values in recorded.items():
            recordings[key] += values
        return output


def _heeding_caches(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    given = named_arguments(module, args, kwargs)
    refuse_left_out(module, given)
    if not (module.training and (has_cache(given) or given.get("use_cache") is True)):
        return forward(*args, **kwargs)
    warn_once(
        f"{class_names(module)[0]}: compiled blocks run uncompiled in passes of training that are given "
        "past_key_values, or use_cache=True"
    )
    before = _CACHE_IS_ASKED_FOR.set(True)
    try:
        return forward(*args, **kwargs)
    finally:
        _CACHE_IS_ASKED_FOR.reset(before)


def _is_eager(block: nn.Module) -> bool:
    """Tell whether operations of ``block`` are watched, or draw other numbers than a graph would."""
    if is_followed(block):
        return True
    if draws_in_slices(block):
        warn_once(_cannot_draw(block))
        return True
    if writes_into_inputs(block):
        warn_once(_cannot_write(block))
        return True
    return False


def _keeps_something(block: nn.Module) -> bool:
    """Tell whether a pass that trains changes buffers, which a graph of both passes would change twice."""
    if not (block.training and torch.is_grad_enabled() and may_keep_something(block)):
        return False
    if has_been_watched(block):
        warn_once(_cannot_keep(block))
    return True


def overlap_tensor_parallel(tp_mesh: DeviceMesh) -> None:
    """Split gathers and reduce-scatters of blocks that are compiled from now on, beside their matmuls.

    torch.compile does it (its pass of the name "micro pipeline") wherever a gather feeds matrix products or one matrix
    product feeds a reduce-scatter: all four of a block's forward pass, and the two gathers of its backward pass.

    Raises:
        ValueError: if the tp group has no symmetric memory, which ranks read from each other.
    """
    group = tp_mesh.get_group()
    if group.size() == 1:
        warn_once("enable_async_tensor_parallel=True does nothing with tp=1")
        return
    backend = dist.get_backend_config(group)
    if tp_mesh.device_type != "cuda" or "nccl" not in backend:
        raise ValueError(
            "enable_async_tensor_parallel=True needs symmetric memory, which torch has on CUDA devices under NCCL; "
            f"the mesh is on {tp_mesh.device_type!r} and communicates with {backend}; leave it at False"
        )
    overlap_in_compiled_graphs(group)
    log(f"compiled blocks overlap the collectives of tp={group.size()} with matrix products")


def assume_no_packing(assume: bool) -> None:
    """Lets masks and flash attention take every row for one document (``assume``), without waiting for the device."""
    set_test_of_packing(not assume)


def _cannot_draw(block: nn.Module) -> str:
    return (
        f"a {class_names(block)[0]} draws random numbers (dropout) where ranks of tp hold different heads or rows, "
        "and a compiled graph would draw the same on all of them: its training passes run uncompiled"
    )


def _cannot_write(block: nn.Module) -> str:
    return (
        f"a child of a {class_names(block)[0]} multiplies what enters it by noise, in place, behind a collective: "
        "a compiled graph would not write into the tensor before it, so training passes run uncompiled"
    )


def _cannot_keep(block: nn.Module) -> str:
    return (
        f"the forward pass of a {class_names(block)[0]} changes what it keeps (a buffer, a counter), which a compiled "
        "block with activation checkpointing would change twice: its training passes run uncompiled"
    )


def _cannot_record(block: nn.Module, keys: Iterable[str]) -> str:
    return (
        f"{', '.join(keys)} are asked for from inside of a {class_names(block)[0]}, which torch cannot hand out of a "
        "compiled block with activation checkpointing: such calls run uncompiled"
    )


def _run(forward: Callable, keys: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, list]]:
    """Runs, inside of the graph, the forward pass and what transformers records in it under ``keys``."""
    recorded: dict[str, list] = {key: [] for key in keys}
    with recording_inside_graph(recorded):
        return forward(*args, **kwargs), recorded
