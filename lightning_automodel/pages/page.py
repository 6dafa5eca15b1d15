"""Fills a template, and writes the page."""

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
