"""Fills a template, and writes the page."""

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_TEMPLATES = Environment(
    loader=PackageLoader("lightning_automodel.pages"),
    autoescape=True,  # everything: names of runs and files are of other people
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder; what is not markup already is escaped."""
    return _TEMPLATES.get_template(template).render(**values)


def refuse_unwritable(path: str) -> None:
    """Find before a page is made that it could not be written, as far as folders tell.

    Raises:
        ValueError: if there is a folder of this name, or the page's folder can neither be written to nor made.
    """
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {path}: it is a folder, or its folder cannot be written to")


def save(path: str, page: str) -> None:
    """Write ``page`` to a file, whose folder is made if there is none.

    Raises:
        ValueError: if that cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
