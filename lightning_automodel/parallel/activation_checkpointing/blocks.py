"""Activation checkpointing of blocks: what the backward pass needs is saved in part and computed again in part.

What is computed again sees the parameters, the sequence length, the random numbers, the routes and the buffers of the
forward pass.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_automodel._compat.transformers.experts import replace_grouped_products
from lightning_automodel._compat.transformers.models import checkpoint_function, checkpoints_with_cache
from lightning_automodel.config.activation_checkpointing import SCOPES, Mode, Scope, check_checkpointing, scopes_of
from lightning_automodel.distributed.logs import log, warn_once
from lightning_automodel.modules.caches import (
    caches_by_name,
    has_cache,
    leave_out_cache,
    refuse_left_out,
    taking_caches,
)
from lightning_automodel.modules.forward import (
    Around,
    Context,
    Nested,
    keep_for_recomputation,
    named_arguments,
    recomputation_context,
    wrap_forward,
)
from lightning_automodel.modules.kept_states import KeptState
from lightning_automodel.modules.structure import (
    CONTAINERS,
    class_names,
    find_blocks,
    find_towers,
    outermost,
    tower_modalities,
)
from lightning_automodel.parallel.activation_checkpointing.selective import SELECTIVE, Contexts, keeping_routes, saving
from lightning_automodel.parallel.given_containers import recomputed_with

_BLOCK = "_block_of_checkpointed_part"
_CHOSEN = "_checkpointed_by_config"
_SWITCH = "_checkpointed_if_asked"


def apply_activation_checkpointing(
    model: nn.Module, mode: Mode = "full", scope: Scope = "all", *, offload: bool = False
) -> None:
    """Makes blocks keep less than the backward pass needs while ``model`` trains, and compute the rest again there.

    Non-reentrant, in place, and the same numbers. From now on transformers' own switches
    (``gradient_checkpointing_enable()``, ``..._disable()``, a layer's flag) do the same for blocks that ``mode`` leaves
    alone, whenever they are called: inside of hooks transformers' own cannot recompute.

    Args:
        model: before or after it was made parallel.
        mode: ``True`` or "full": each block keeps its input. "submodule": each child of a block keeps its input.
            "selective": blocks keep their input, the results of attention and every second matrix product. A list
            of operations: blocks keep their input and these results ("attention", "matmul", or torch's names such as
            "aten.mm"). ``False``: nothing but what transformers is asked for.
        scope: one or several of "language" (blocks outside of towers), "vision", "audio" (of towers), "multimodal"
            (all towers), "all".
        offload: what blocks keep waits in host memory.

    Raises:
        ValueError: if a value does not exist, or no module would be checkpointed.
    """
    check_checkpointing(mode, scope, offload)
    chosen = _blocks_in(model, scopes_of(scope)) if mode else []
    if mode and not chosen:
        raise ValueError(_nothing_found(model, scope))
    for block in find_blocks(model).values():
        _install_switch(block)
    for holder in taking_caches(model):
        holder.register_forward_pre_hook(_refuse_cache, with_kwargs=True)
    for block in chosen:
        block.__dict__[_CHOSEN] = True
        for part in _parts(block) if mode == "submodule" else [block]:
            _install(part, block, mode, offload)
    if chosen:
        where = ", and keep the rest on the host" if offload else ""
        log(f"{type(model).__name__}: {len(chosen)} blocks recompute activations ({mode}{where})")


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """Finds the blocks of the language model, whose activations are worth recomputing; those of towers are left out."""
    return _blocks_in(model, ["language"])


# ---- which modules ---------------------------------------------------------------------------------------------------


def _blocks_in(model: nn.Module, scopes: Sequence[str]) -> list[nn.Module]:
    towers = find_towers(model)
    kinds = {name: {"all", "multimodal", *tower_modalities(tower)} for name, tower in towers.items()}
    found = []
    for name, block in find_blocks(model).items():
        tower = outermost(list(towers), name)
        if not {"all", "language"}.isdisjoint(scopes) if tower is None else not kinds[tower].isdisjoint(scopes):
            found.append(block)
    return found


def _nothing_found(model: nn.Module, scope: Scope) -> str:
    present = [kind for kind in SCOPES if kind != "all" and _blocks_in(model, [kind])]
    has = f"it has blocks of {', '.join(present)}" if present else "it has no repeated blocks; switch it off"
    return f"activation_checkpointing with scope {scope!r} finds nothing to checkpoint in {type(model).__name__}: {has}"


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Finds the children that hold parameters: attention, feed-forward, norms."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _parts(child)
        elif next(child.parameters(), None) is not None:
            yield child


# ---- one module ------------------------------------------------------------------------------------------------------


def _install(part: nn.Module, block: nn.Module, mode: Mode, offload: bool) -> None:
    part.__dict__[_BLOCK] = block
    wrap_forward(part, _checkpointed(part, mode, offload))


def _checkpointed(module: nn.Module, mode: Mode, offload: bool) -> Around:
    names: tuple[str, ...] = SELECTIVE if mode == "selective" else () if isinstance(mode, bool | str) else tuple(mode)
    routes = _may_route(module)
    if names and routes:
        replace_grouped_products()
    eager = [*([keeping_routes] if routes else []), *([saving(names)] if names else [])]
    in_graph: dict[str, Any] = {"context_fn": saving((*names, "routing"))} if names or routes else {}

    def checkpointed(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not checkpoints_with_cache(module):
            args, kwargs = caches_by_name(module, args, kwargs)
            kwargs = leave_out_cache(kwargs)  # it would be written a second time
        with _kept_on_host(args) if offload else nullcontext():
            return _checkpoint(checkpoint, module, partial(forward, **kwargs), args, eager, in_graph)

    return checkpointed


def _checkpoint(
    function: Callable,
    module: nn.Module,
    forward: partial,
    args: tuple,
    eager: Sequence[Contexts],
    in_graph: dict[str, Any],
) -> Any:
    if torch.compiler.is_compiling():  # the graph holds both passes: nothing has to be put in place again
        return function(forward, *args, use_reentrant=False, **in_graph)
    run = recomputed_with(partial(forward.func, *forward.args), args, forward.keywords)
    as_now, kept = recomputation_context(module.__dict__[_BLOCK]), KeptState(module)
    output = function(run, *args, use_reentrant=False, context_fn=lambda: _nested(eager, as_now, kept.again))
    kept.settle()
    return output


# ---- transformers' own switches --------------------------------------------------------------------------------------


def _install_switch(block: nn.Module) -> None:
    """Make the flag that transformers' switches set ask for our recomputation from now on."""
    for module in block.modules():
        if isinstance(module, GradientCheckpointingLayer) and not has_switch(module):
            module.__dict__[_SWITCH] = True
            module.__dict__.setdefault(_BLOCK, block)
            wrap_forward(module, _checkpointed_if_asked(module))
            keep_for_recomputation(module, _off_again)


def has_switch(module: nn.Module) -> bool:
    """Tells whether transformers' own flag of this layer means our recomputation."""
    return _SWITCH in module.__dict__


def _checkpointed_if_asked(module: nn.Module) -> Around:
    routes = _may_route(module)
    eager: list[Contexts] = [keeping_routes] if routes else []
    in_graph: dict[str, Any] = {"context_fn": saving(("routing",))} if routes else {}

    def around(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not (module.gradient_checkpointing and module.training):
            return forward(*args, **kwargs)
        module.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            is_inside = module.__dict__[_BLOCK] is not module  # of a block that is computed again as a whole
            if is_inside or _CHOSEN in module.__dict__ or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            function, contexts = _as_asked(module)
            if not checkpoints_with_cache(module):
                args, kwargs = caches_by_name(module, args, kwargs)
                kwargs = leave_out_cache(kwargs)
            return _checkpoint(function, module, partial(forward, **kwargs), args, [*eager, *contexts], in_graph)
        finally:
            module.gradient_checkpointing = True  # type: ignore[assignment]

    return around


def _as_asked(module: nn.Module) -> tuple[Callable, list[Contexts]]:
    """Return the function by which transformers would checkpoint, and the contexts that a user gave it."""
    function = checkpoint_function(module, checkpoint)
    options = getattr(function, "keywords", {})
    if options.get("use_reentrant") and not torch.compiler.is_compiling():
        warn_once(
            "gradient_checkpointing_enable(use_reentrant=True): blocks of a model that was made parallel are computed "
            "again by use_reentrant=False, with the same numbers"
        )
    return function, [options["context_fn"]] if "context_fn" in options else []


def _off_again(module: nn.Module) -> Context:
    @contextmanager
    def off_again() -> Generator[None, None, None]:
        before, module.gradient_checkpointing = module.gradient_checkpointing, False  # type: ignore[assignment]
        try:
            yield
        finally:
            module.gradient_checkpointing = before

    return off_again


# ---- caches ----------------------------------------------------------------------------------------------------------


def _refuse_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a cache that a user gives to a model whose blocks are computed again: they would go on without it."""
    given = named_arguments(module, args, kwargs)
    refuse_left_out(module, given)
    if not (module.training and torch.is_grad_enabled()):
        return
    if has_cache(given) and any(is_checkpointed(block) for block in find_blocks(module).values()):
        raise ValueError(
            f"{class_names(module)[0]} trains with activation checkpointing, which computes blocks again without a "
            "cache, and was called with past_key_values: what these hold, or should keep, would be left out. Use "
            "activation_checkpointing=False (gradient_checkpointing_disable()), or give the whole sequence to one "
            "pass; in evaluation mode caches work"
        )


# ---- contexts --------------------------------------------------------------------------------------------------------


def is_checkpointed(block: nn.Module) -> bool:
    """Tells whether the block or a part of it is computed again in the backward pass, as things are now."""
    return _CHOSEN in block.__dict__ or (has_switch(block) and bool(block.gradient_checkpointing))


def _nested(contexts: Sequence[Contexts], *as_now: Context) -> tuple[Nested, Nested]:
    """Nests contexts for the forward pass and the recomputation, whose setup must stay unseen by what watches
    operations.
    """
    pairs = [make() for make in contexts]
    forward: list[Context] = [lambda pair=pair: pair[0] for pair in pairs]  # type: ignore[misc]
    again: list[Context] = [lambda pair=pair: pair[1] for pair in pairs]  # type: ignore[misc]
    return Nested(forward), Nested([*as_now, *again])


def _may_route(module: nn.Module) -> bool:
    """Tells whether experts may be inside: several matrices in one parameter, or a list of modules.

    To watch every operation costs time, so it is not done for others.
    """
    fused = any(p.ndim >= 3 for p in module.parameters())
    return fused or any(isinstance(m, nn.ModuleList) and len(m) > 1 for m in module.modules())


def _kept_on_host(args: tuple) -> AbstractContextManager:
    device = next((x.device.type for x in args if isinstance(x, torch.Tensor)), "cpu")
    return save_on_cpu(pin_memory=device == "cuda", device_type=device)
