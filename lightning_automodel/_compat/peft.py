"""Private names of peft, with the reason: what it does to layers whose weights are DTensors."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE, _FLAG = "peft.tuners.tuners_utils", "_torch_supports_distributed"


@contextmanager
def whole_layers() -> Generator[None, None, None]:
    """Make peft build adapters for whole layers within this context, wherever their weights are DTensors.

    It would take the shape of a rank's part, which is right for modules that compute with it as they are. Ours are made
    parallel when all adapters are there. Who does not import peft does not pay for it: that takes seconds, most of
    them for bitsandbytes and what it compiles with.
    """
    found: list[bool] = []

    def clear(module: ModuleType) -> None:
        found.append(getattr(module, _FLAG))
        setattr(module, _FLAG, False)

    imported = _Imported(clear)
    if _MODULE in sys.modules:
        clear(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, imported)
    try:
        yield
    finally:
        if imported in sys.meta_path:
            sys.meta_path.remove(imported)
        for value in found:
            setattr(sys.modules[_MODULE], _FLAG, value)


class _Imported(MetaPathFinder):
    """Calls ``act`` with the module when it has been imported for the first time."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
