"""What mkdocs does beside building pages: modules are spelled out, roles of docstrings and links to files mended."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[(`?)([^\]`]+)\1\]\((?:\.\./)+([^)]+)\)")
_ALL = re.compile(r"^::: (\S+)\.__all__$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):<code>~?([\w.]+)</code>")
_API = Path(__file__).parents[1] / "api"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Complete a page before it is built."""
    return name_files(spell_out(markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make links of roles of Sphinx, in which docstrings name functions, and one colon of two before code."""
    return _ROLE.sub(lambda found: _link(found[1]), html.replace("::</p>", ":</p>"))


def name_files(markdown: str) -> str:
    """Write `examples/vision.yaml` in the place of a link to it, which works in a checkout only."""
    return _OUTSIDE.sub(lambda found: found[0] if found[3].endswith(".md") else f"`{found[3]}`", markdown)


def spell_out(markdown: str) -> str:
    """Write all public names of a module in the place of `::: package.module.__all__`."""

    def names(found: re.Match[str]) -> str:
        public = importlib.import_module(found[1]).__all__
        return "\n\n".join(f"::: {found[1]}.{name}" for name in public)

    return _ALL.sub(names, markdown)


def documented() -> Iterable[str]:
    """List the names that the reference holds."""
    for page in sorted(_API.glob("*.md")):
        yield from re.findall(r"^::: (\S+)$", spell_out(page.read_text()), re.MULTILINE)


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    place = next((full for full in documented() if full.rpartition(".")[2] == short), None)
    return (
        f'<autoref identifier="{place}" optional><code>{short}</code></autoref>' if place else f"<code>{short}</code>"
    )
