"""Chats and preference pairs from the docstrings of Python's standard library: python -m examples.records DIRECTORY.

    chats.jsonl    {"messages": [{"role": "user", "content": "What does textwrap.dedent do?"}, ...]}
    pairs.jsonl    {"prompt": "def dedent(text):\\n    ", "chosen": ..., "rejected": the docstring of another function}

``examples/quickstart.py`` calls it; the examples beside it read what it writes.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

MOST = 512  # of each


def main() -> None:
    """Writes both files."""
    write_records(Path(sys.argv[1]))


def write_records(folder: Path) -> None:
    """Writes ``chats.jsonl`` and ``pairs.jsonl``."""
    functions = list(documented_functions())[: MOST + 1]
    with (folder / "chats.jsonl").open("w") as chats, (folder / "pairs.jsonl").open("w") as pairs:
        for (name, header, line), (_, _, other) in pairwise(functions):
            question = {"role": "user", "content": f"What does {name} do?"}
            chats.write(json.dumps({"messages": [question, {"role": "assistant", "content": line}]}) + "\n")
            if line != other:
                pairs.write(json.dumps({"prompt": header, "chosen": line, "rejected": other}) + "\n")


def documented_functions() -> Iterator[tuple[str, str, str]]:
    """Yields name, header and first line of the docstring of each documented function at the top of a module."""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.parse(source.read_text("utf-8")).body:
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and isinstance(node, ast.FunctionDef):
                header = f"def {node.name}({ast.unparse(node.args)}):\n    "
                yield f"{source.stem}.{node.name}", header, text.partition("\n")[0]


if __name__ == "__main__":
    main()
