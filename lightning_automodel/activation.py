"""Activation checkpointing of blocks: what the backward pass needs is saved in part and computed again in part.

What is computed again sees the parameters, the sequence length, the random numbers and the routes of the forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_automodel.blocks import CONTAINERS, find_blocks, find_towers, outermost, tower_modalities
from lightning_automodel.calls import Around, Context, recomputation_context, wrap_forward
from lightning_automodel.saving import SELECTIVE, Contexts, keeping_routes, saving

MODES = ("full", "selective", "submodule")
SCOPES = ("all", "language", "vision", "audio", "multimodal")

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
_BLOCK = "_block_of_checkpointed_part"

Mode = bool | str | Sequence[str]
Scope = str | Sequence[str]


def check_checkpointing(mode: Mode, scope: Scope, offload: bool) -> None:
    """Checks the values of the three fields of a config.

    Raises:
        ValueError: for a mode, scope or operation that does not exist, or for a field that would do nothing.
    """
    if not isinstance(mode, bool | str | Sequence):
        raise ValueError(
            f"activation_checkpointing={mode!r}: use True, False, {', '.join(MODES)}, or a list of operations"
        )
    if isinstance(mode, str) and mode not in MODES:
        raise ValueError(
            f"activation_checkpointing={mode!r} is not one of {', '.join(MODES)}, True or False; to choose what is "
            "saved give a list, such as ['attention', 'matmul'] or ['aten.mm']"
        )
    if not isinstance(mode, bool | str):
        saving(tuple(mode))  # raises for what does not exist
    if unknown := sorted(set(_scopes(scope)) - set(SCOPES)):
        raise ValueError(f"activation_checkpointing_scope={unknown[0]!r} is not one of {', '.join(SCOPES)}")
    if not mode and (_scopes(scope) != ["all"] or offload):
        field = "activation_offload" if offload else "activation_checkpointing_scope"
        raise ValueError(f"{field} does nothing without checkpointing; set activation_checkpointing='full' too")


def apply_activation_checkpointing(
    model: nn.Module, mode: Mode = "full", scope: Scope = "all", *, offload: bool = False
) -> None:
    """While ``model`` trains, its blocks keep less than the backward pass needs, and compute the rest again there.

    Non-reentrant, in place, and the same numbers. Blocks for which ``gradient_checkpointing_enable()`` was called are
    taken over whatever ``mode`` says: inside of hooks transformers' own cannot recompute.

    Args:
        model: before or after it was made parallel.
        mode: ``True`` or "full": each block keeps its input. "submodule": each child of a block keeps its input.
            "selective": blocks keep their input, the results of attention and every second matrix product. A list
            of operations: blocks keep their input and these results ("attention", "matmul", or torch's names such as
            "aten.mm"). ``False``: nothing but what transformers was asked for.
        scope: one or several of "language" (blocks outside of towers), "vision", "audio" (of towers), "multimodal"
            (all towers), "all".
        offload: what blocks keep waits in host memory.

    Raises:
        ValueError: if a value does not exist, or no module would be checkpointed.
    """
    check_checkpointing(mode, scope, offload)
    chosen = _blocks_in(model, _scopes(scope)) if mode else []
    asked = [block for block in find_blocks(model).values() if _take_over(block)]
    if mode and not chosen:
        raise ValueError(_nothing_found(model, scope))
    for block in asked:
        if block not in chosen:
            _install(block, block, "full", offload)
    for block in chosen:
        for part in _parts(block) if mode == "submodule" else [block]:
            _install(part, block, mode, offload)


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of the language model, whose activations are worth recomputing; those of towers are not among them."""
    return _blocks_in(model, ["language"])


# ---- which modules ---------------------------------------------------------------------------------------------------


def _scopes(scope: Scope) -> list[str]:
    return [scope] if isinstance(scope, str) else list(scope)


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


def _take_over(block: nn.Module) -> bool:
    """Switches off what ``gradient_checkpointing_enable()`` switched on, and says whether it was on."""
    if not isinstance(block, GradientCheckpointingLayer) or not block.gradient_checkpointing:
        return False
    block.gradient_checkpointing = False
    return True


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Attention, feed-forward, norms: the children that hold parameters."""
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
    eager = [*([keeping_routes] if routes else []), *([saving(names)] if names else [])]
    in_graph: dict[str, Any] = {"context_fn": saving((*names, "routing"))} if names or routes else {}

    def checkpointed(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not getattr(module, "_can_checkpoint_with_cache", False):
            kwargs = without_cache(kwargs)  # it would be written a second time
        if torch.compiler.is_compiling():  # the graph holds both passes: nothing has to be put in place again
            return checkpoint(forward, *args, use_reentrant=False, **in_graph, **kwargs)
        as_now = recomputation_context(module.__dict__[_BLOCK])
        with _kept_on_host(args) if offload else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: _nested(eager, as_now), **kwargs)

    return checkpointed


def has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a block is called with a cache of keys and values."""
    return any(kwargs.get(name) is not None for name in _CACHES)


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block, without the cache of keys and values that transformers' configs ask for by default."""
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    return kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def is_checkpointed(block: nn.Module) -> bool:
    """Whether the block or a part of it is computed again in the backward pass."""
    return any(_BLOCK in module.__dict__ for module in block.modules())


class _Nested(AbstractContextManager):
    """Several contexts as one that can be entered again: a graph that is kept is recomputed in every backward pass."""

    def __init__(self, makers: Sequence[Context]) -> None:
        self._makers = makers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for make in self._makers:
            self._stack.enter_context(make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _nested(contexts: Sequence[Contexts], as_now: Context) -> tuple[_Nested, _Nested]:
    """For the forward pass and for the recomputation; what watches operations must not see how the latter is set up."""
    pairs = [make() for make in contexts]
    forward: list[Context] = [lambda pair=pair: pair[0] for pair in pairs]  # type: ignore[misc]
    again: list[Context] = [lambda pair=pair: pair[1] for pair in pairs]  # type: ignore[misc]
    return _Nested(forward), _Nested([as_now, *again])


def _may_route(module: nn.Module) -> bool:
    """Whether experts may be inside: several matrices in one parameter, or a list of modules.

    To watch every operation costs time, so it is not done for others.
    """
    fused = any(p.ndim >= 3 for p in module.parameters())
    return fused or any(isinstance(m, nn.ModuleList) and len(m) > 1 for m in module.modules())


def _kept_on_host(args: tuple) -> AbstractContextManager:
    device = next((x.device.type for x in args if isinstance(x, torch.Tensor)), "cpu")
    return save_on_cpu(pin_memory=device == "cuda", device_type=device)
