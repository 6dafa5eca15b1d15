"""Reads the pages of the repository: their links, their blocks of code, the command lines in them."""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line where it begins, its language and text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README, the list for tools, and all pages of docs."""
    return [ROOT / "README.md", ROOT / "llms.txt", *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> list[str]:
    """Targets of the links of a page, in their order; none of those in blocks of code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text("utf-8")))
    return _LINK.findall(text)


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of these languages; of none: all."""
    text = page.read_text("utf-8")
    found = ((text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in _FENCE.finditer(text))
    return [Block(page, line, kind, body) for line, kind, body in found if not languages or kind in languages]


def command_lines(block: Block) -> Iterator[str]:
    """The commands of a block of shell, each on one line, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*$", "", line).strip()
        if command:
            yield re.sub(r"\s+", " ", command)


def unbound(code: str) -> set[str]:
    """Names that a program uses, and nothing in it makes: of a complete program there are none."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return used - made - set(dir(builtins))
