"""Turns import paths that users write in YAML or on the command line into the objects that they name."""

import importlib
from collections.abc import Iterable
from typing import Any


def import_class_from_path(name: str) -> Any:
    """Imports the class, function or other object at ``package.module.name``.

    Raises:
        ValueError: if ``name`` is not such a path, or nothing can be imported there.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"{name!r} is not an import path; write package.module.name")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error


def import_classes_from_paths(paths: Iterable[str]) -> list[Any]:
    """Imports each path by :func:`import_class_from_path`."""
    return [import_class_from_path(path) for path in paths]
