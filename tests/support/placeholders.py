"""What stands in the pages for a reader's own, and what runs in its place; which command lines do not run, and why."""

import re
from collections.abc import Iterator

from tests.support.documents import Block, blocks, command_lines, pages

READ_AS = {
    "path/or/name": "build/quickstart/export",
    "data/*.jsonl": "build/quickstart/text/a*.py",
    "held_out/*.jsonl": "build/quickstart/text/ast.py",
    "devices=8": "devices=2",
    "tp=4": "tp=2",
    "tp=8": "tp=2",
    "accelerator=gpu": "accelerator=cpu",
    "max_epochs=1": "max_steps=2",
}
WORDS = {  # of command lines
    "CKPT": "build/quickstart/checkpoints/step=100.ckpt",
    "DIRECTORY": "build/pages/export",
    "FILE": "build/pages/plain.ckpt",
    "MODEL": "build/quickstart/export",
    "RUN_DIR": "build/quickstart/logs/version_0",
}
NOT_RUN = {  # beginnings of command lines
    "pip install": "needs a network; whoever plays the first hour has installed it",
    "make quickstart": "is `make venv` and the quickstart, which runs as README says it",
    "git clone": "needs a network",
    "python -m tests.lightning_suite": "needs the clone of the line above it, and hours",
    "python -m pip download": "needs a network",
    "python3 -m pip install -q --no-index": "needs the wheels of the line above it",
    "export PYTHONPATH=/tmp/site": "is for a machine with a GPU, where the line above it has installed what is there",
    "export NCCL_SOCKET_IFNAME=lo": "is for the same machine",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2": "needs two nodes; `make faults` plays it",
}


def read_as(text: str) -> str:
    """Replaces placeholders."""
    for placeholder, value in READ_AS.items():
        text = text.replace(placeholder, value)
    return text


def command_read_as(command: str) -> str:
    """Replaces placeholders of a command line."""
    return re.sub(rf"\b({'|'.join(WORDS)})\b", lambda found: WORDS[found[0]], read_as(command))


def commands_that_run(found: list[Block]) -> Iterator[tuple[Block, str]]:
    """The command lines of the pages that are run, as they are written."""
    yield from ((b, line) for b in found for line in command_lines(b) if not line.startswith(tuple(NOT_RUN)))


def shell() -> list[Block]:
    """All blocks of shell."""
    return [block for page in pages() for block in blocks(page, "sh")]
