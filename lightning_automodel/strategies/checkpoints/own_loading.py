"""Calls a module's own ``load_state_dict``, which may rename or drop entries, before each rank reads its parts."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_automodel._compat.torch.modules import incompatible_keys

Restore = Callable[[nn.Module, Mapping[str, Any], bool], None]


def load_through(module: nn.Module, source: Mapping[str, Any], strict: bool, restore: Restore) -> None:
    """Call ``module.load_state_dict(source, strict=strict)``, where ``restore`` takes the place of torch's own.

    Args:
        module: whose class, or a callback, may have a method of its own around torch's, or call that of modules in it.
        source: what a checkpoint holds; of a folder, tensors that are not read yet.
        strict: of the module.
        restore: ``(module or one within it, entries, strict)``, collective.
    """
    with _torch_reads(module, restore):
        module.load_state_dict(source, strict=strict)


@contextmanager
def _torch_reads(module: nn.Module, restore: Restore) -> Generator[None, None, None]:
    original = nn.Module.load_state_dict
    parts = {id(part) for part in module.modules()}

    def load_state_dict(self: nn.Module, source: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if id(self) not in parts:
            return original(self, source, strict, assign)
        nn.Module.load_state_dict = original  # type: ignore[method-assign]
        try:
            restore(self, source, strict)
        finally:
            nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]
        known = set(nn.Module.state_dict(self))
        return incompatible_keys(sorted(known - source.keys()), sorted(source.keys() - known))

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.load_state_dict = original  # type: ignore[method-assign]
