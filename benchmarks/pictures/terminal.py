"""Records what the terminal shows: the quickstart, and runs that fail with one line; writes docs/terminal.md.

Each command runs in a terminal of its own (a pty), and what a screen shows at its end is kept: of a bar its last form.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._measure import describe_machine

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "terminal.md"
RECORDINGS: dict[str, tuple[str, ...]] = {
    "The quickstart": ("python -m examples.quickstart",),
    "What was trained": (
        "lightning-automodel evaluate build/quickstart/export --files='build/quickstart/text/ast.py'",
        "lightning-automodel generate build/quickstart/export --prompt='def main' --sampling.max_new_tokens=24",
    ),
    "Runs that fail": (
        "lightning-automodel fit --config=examples/full.yaml --trainer.strategy.tp=3",
        "lightning-automodel fit --config=examples/full.yaml --trainer.strategy.sequence_paralel=true",
        "lightning-automodel fit --config=examples/full.yaml --data.train_files='nowhere/*.jsonl'",
        "lightning-automodel fit --config=examples/full.yaml --data.train_files=build/pairs.jsonl",
        "lightning-automodel fit --config=examples/full.yaml --model.model=build/nowhere",
        "lightning-automodel fit --config=examples/full.yaml --data.packing=maybe",
        "lightning-automodel export build/quickstart/checkpoints/step=100.ckpt build/quickstart/export",
    ),
}
COLUMNS = 120
HOME = "/home/you"  # stands for the folder in which the commands run
_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\r\n\x1b]+)")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures.terminal", description=__doc__)
    parser.add_argument("--output", type=Path, default=DOCUMENT)
    parser.add_argument("--folder", type=Path, help="where the commands run; none: a new one, which goes afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as new:
        folder = options.folder or Path(new)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "build").mkdir(exist_ok=True)
        (folder / "build" / "pairs.jsonl").write_text('{"text": "one"}\n{"prompt": ["two"], "completion": "three"}\n')
        made = f"Written by `python -m benchmarks.pictures.terminal` ({describe_machine()})."
        parts = [f"# Recordings of the terminal\n\n{made}"]
        for title, commands in RECORDINGS.items():
            parts.append(f"## {title}\n\n{recorded(commands, folder)}")
            options.output.write_text("\n\n".join(parts) + "\n")


def recorded(commands: tuple[str, ...], folder: Path) -> str:
    """A block of Markdown: each command, what it shows, and its exit code where that is not 0."""
    lines = []
    for command in commands:
        shown, code = record(command, folder)
        lines += [f"$ {command}", *shown, *([f"[exit code {code}]"] if code else [])]
        print("\n".join(lines[-len(shown) - 2 :]), flush=True)
    return "\n".join(["```console", *lines, "```"])


def record(command: str, folder: Path) -> tuple[list[str], int]:
    """Runs ``command`` in a terminal of ``COLUMNS``; returns what a screen would show at the end, and the exit code."""
    ours, theirs = pty.openpty()
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(COLUMNS),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # the terminal is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    return on_screen(written.decode("utf-8", "replace").replace(str(folder), HOME)), process.wait()


def on_screen(text: str) -> list[str]:
    """What a screen without end shows of ``text``: lines that are not empty, without trailing space."""
    lines, row, column = [""], 0, 0
    for number, command, move, written in _PARTS.findall(text):
        if command == "A":
            row = max(row - int(number or 1), 0)
        elif command == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif move == "\r":
            column = 0
        elif move == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif written:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + written + line[column + len(written) :]
            column += len(written)
    return [line.rstrip() for line in lines if line.strip()]


if __name__ == "__main__":
    main()
