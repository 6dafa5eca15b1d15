"""Caches of keys and values in training: configs of transformers ask for one by default, which blocks that are compiled
or computed again leave out; what a user gives or asks for is another matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_automodel.modules.forward import arguments_of
from lightning_automodel.modules.structure import class_names, find_blocks, outermost

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
_FOUND = "_found_in_a_cache"
_NEXT = "_layer_behind_what_was_found"
_LEFT_OUT = "_blocks_left_it_out_in_training"


def new_in_caches(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Take out what a block has put into the caches that it was called with, and a gradient may come back through.

    Each tensor is found once: by the block that put it there.
    """
    return [tensor for cache in _caches(kwargs) for part in _parts(cache) for tensor in _new_in(part)]


def kept_in_caches(values: Mapping[str, Any]) -> list[Tensor]:
    """List what caches hold that a gradient may come back through, of passes before too."""
    layers = [layer for cache in _caches(values) for part in _parts(cache) for layer in part.layers]
    return [value for layer in layers for value in vars(layer).values() if _is_trained(value)]


def _parts(cache: Any) -> list[Any]:
    """List what of a cache of transformers has layers: encoder-decoders have two in one."""
    nested = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [part for part in (cache, *nested) if isinstance(getattr(part, "layers", None), list)]


def _new_in(cache: Any) -> list[Tensor]:
    """Look from the layer behind the last one that was found, where the next block writes, up to what is found."""
    begin, found = cache.__dict__.get(_NEXT, 0), list[Tensor]()
    for index in (*range(begin, len(cache.layers)), *range(min(begin, len(cache.layers)))):
        new = [value for value in vars(cache.layers[index]).values() if _is_new(value)]
        if found and not new:
            break
        for value in new:
            value.__dict__[_FOUND] = True
            cache.__dict__[_NEXT] = index + 1
        found += new
    return found


def _is_new(value: Any) -> bool:
    return _is_trained(value) and _FOUND not in value.__dict__


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Tells whether a block is called with a cache of keys and values."""
    return any(True for _ in _caches(kwargs))


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes from a block's arguments the cache of keys and values that transformers' configs ask for by default."""
    kwargs = {name: None if _is_cache(name, value) else value for name, value in kwargs.items()}
    return kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def leave_out_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes it, and lets :func:`refuse_left_out` know it again."""
    for cache in _caches(kwargs):
        if hasattr(cache, "__dict__"):
            cache.__dict__[_LEFT_OUT] = True
    return without_cache(kwargs)


def refuse_left_out(module: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse a cache in which blocks of an earlier pass kept nothing.

    Args:
        module: is called.
        given: its arguments, by name.

    Raises:
        ValueError: naming the way out.
    """
    if any(hasattr(cache, "__dict__") and _LEFT_OUT in cache.__dict__ for cache in _caches(given)):
        raise ValueError(
            f"{class_names(module)[0]} was called with past_key_values of a pass that trained, in which blocks kept "
            "nothing there (they are compiled, or computed again). Without activation checkpointing, call the first "
            "pass with use_cache=True, or with a cache of your own; in evaluation mode caches work"
        )


def taking_caches(model: nn.Module) -> Iterator[nn.Module]:
    """Find the outermost modules around blocks that a user may give a cache of keys and values."""
    ends = list(find_blocks(model))
    for name, module in model.named_modules():
        if outermost(ends, name) is None and not {*_CACHES, "cache"}.isdisjoint(arguments_of(module)):
            yield module
            ends.append(name)
            if module is model:
                return


def caches_by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give the arguments of a call their names from the first cache on: GPT-2 hands it to its blocks by place."""
    names = arguments_of(module) if args else []
    at = next((i for i, (name, value) in enumerate(zip(names, args, strict=False)) if _is_cache(name, value)), None)
    if at is None or len(args) > len(names):
        return args, kwargs
    return args[:at], {**dict(zip(names[at:], args[at:], strict=False)), **kwargs}


def _caches(kwargs: Mapping[str, Any]) -> Iterator[Any]:
    return (value for name, value in kwargs.items() if value is not None and _is_cache(name, value))


def _is_cache(name: str, value: Any) -> bool:
    """Tells whether an argument is a cache; transformers calls it ``cache`` from 5.24 on.

    In a block of one's own that may be a table of tensors (of rotary embeddings), which stays.
    """
    return name in _CACHES or (name == "cache" and not isinstance(value, Tensor | Sequence | Mapping))
