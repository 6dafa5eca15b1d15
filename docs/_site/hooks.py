"""What mkdocs does beside building pages: modules are spelled out, links that leave the folder become file names."""

import importlib
import re
from typing import Any

_OUTSIDE = re.compile(r"\[(`?)([^\]`]+)\1\]\((?:\.\./)+([^)]+)\)")
_ALL = re.compile(r"^::: (\S+)\.__all__$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Complete a page before it is built."""
    return name_files(spell_out(markdown))


def name_files(markdown: str) -> str:
    """Write `examples/vision.yaml` in the place of a link to it, which works in a checkout only."""
    return _OUTSIDE.sub(lambda found: found[0] if found[3].endswith(".md") else f"`{found[3]}`", markdown)


def spell_out(markdown: str) -> str:
    """Write all public names of a module in the place of `::: package.module.__all__`."""

    def names(found: re.Match[str]) -> str:
        public = importlib.import_module(found[1]).__all__
        return "\n\n".join(f"::: {found[1]}.{name}" for name in public)

    return _ALL.sub(names, markdown)
