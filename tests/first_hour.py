"""Plays a new user's first hour in a fresh clone: python -m tests.first_hour [PART ...]; prints a line per step.

    readme      the command lines of README.md, copied from it (the quickstart is the first), and its program
    examples    every example, for a few steps
    mistakes    wrong commands: one line that says what is wrong, the last one, exit code 1, in time
    pages       the command lines of docs/, page by page; its programs and all other blocks are tests (tests/docs)

Placeholders (a model, files, a number of GPUs) are replaced as ``tests/support/placeholders.py`` says, which also lists
the lines that do not run, with the reason; what trains takes a few steps, but in README.md. Nothing else is changed.
What is not committed is not in the clone. Ends with exit code 1 if a step failed.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.documents import ROOT, blocks
from tests.support.placeholders import command_read_as, commands_that_run, read_as

STEPS = "--trainer.max_steps=2"
STEPS_OF_PAGES = "--trainer.max_steps=10 --trainer.log_every_n_steps=5"  # of which `report` has something to say
GPUS_ONLY = ("megatron_fsdp",)
LONGEST = 1800  # seconds, for any command
SECONDS = 10.0  # for a wrong command: processor time of its processes, less the imports of libraries in one of them
OF_THIS_MACHINE = ("PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE")  # variables that a user's shell has not
IMPORTS = "import torch, torch.distributed.tensor, transformers.modeling_layers, lightning.pytorch.cli"

FULL = "lightning-automodel fit --config=examples/full.yaml"
MISTAKES = {
    "lightning-automodel": "a subcommand is missing",
    "lightning-automodel fitt": "did you mean fit?",
    "lightning-automodel fit": "missing: --model.model",
    "lightning-automodel fit --config=nowhere.yaml": "File does not exist",
    f"{FULL} --trainer.maxsteps=2": "did you mean --trainer.max_steps?",
    f"{FULL} --trainer.max_steps=two": "it takes an int",
    f"{FULL} --trainer.strategy.tpp=2": "'tpp'",
    f"{FULL} --trainer.strategy.tp=3": "does not divide the 2 processes",
    f"{FULL} --trainer.strategy.sequence_parallel=true": "did you mean --trainer.strategy.config.sequence_parallel?",
    f"{FULL} --trainer.strategy=fsdpp": "there is no such strategy",
    f"{FULL} --trainer.precision=bf61": "did you mean bf16?",
    f"{FULL} --trainer.accelerator=gpuu": "",
    f"{FULL} --model.model=build/nowhere": "is no directory",
    f"{FULL} --model.model=examples": "has none of model.safetensors",
    f"{FULL} --model.optimizer=AdaW": "there is no such class",
    f"{FULL} --data.train_files='nowhere/*.jsonl'": "matches no file",
    f"{FULL} --data.sequence_length=1": "a row needs 2 tokens",
    f"{FULL} --data.batch_size=0": "must be at least 1",
    f"{FULL} --data.val_fraction=2": "less than 1",
    f"{FULL} --data.chat_template=nowhere.jinja": "nowhere.jinja",
    f"{FULL} --data.train_files=build/broken.jsonl": "broken.jsonl:2",
    f"{FULL} --ckpt_path=build/nowhere.ckpt": "nowhere.ckpt",
    "lightning-automodel fit --config=examples/lora.yaml --model.peft.rr=8": "did you mean peft.r?",
    "lightning-automodel generate build/nowhere": "is no directory",
    "lightning-automodel evaluate build/quickstart/export": "files",
    "lightning-automodel evaluate build/quickstart/export --files=nowhere.txt": "matches no file",
    "lightning-automodel export build/nowhere.ckpt build/out": "there is no checkpoint at",
    "lightning-automodel export examples/full.yaml build/out": "is no checkpoint",
}


@dataclass
class Hour:
    """The clone, and what went wrong in it."""

    folder: Path
    failed: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a shell of the clone."""
        environment = {key: value for key, value in os.environ.items() if key not in OF_THIS_MACHINE}
        return environment | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
        }

    def run(self, command: str) -> tuple[int, str, float]:
        """Runs a command line as a shell of the clone would.

        Returns:
            its exit code, what it wrote to the standard error, and the processor time of it and its children in
            seconds, which other work on the machine changes little.
        """
        with tempfile.TemporaryFile("w+") as errors:
            line = ["timeout", str(LONGEST), "sh", "-c", command]
            process = subprocess.Popen(
                line,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            return process.returncode, errors.read(), usage.ru_utime + usage.ru_stime

    def works(self, command: str) -> None:
        """Runs what must end with exit code 0."""
        started = time.monotonic()
        code, told, seconds = self.run(command)
        took = f"{time.monotonic() - started:4.0f} s (processors: {seconds:3.0f})"
        self.say(code == 0, f"{took}  {command}", told[-2000:])

    def say(self, is_right: bool, line: str, why: str = "") -> None:
        """Prints a step, and what it printed if it failed."""
        print(f"{'ok    ' if is_right else 'FAILED'}  {line}", flush=True)
        if not is_right:
            self.failed.append(line)
            print(why, flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; none: all")
    parser.add_argument("--folder", type=Path, help="a clone in which the quickstart has run; none: a new one")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; use some of {', '.join(PARTS)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as new:
        hour = Hour((options.folder or cloned(Path(new) / "clone")).resolve())
        if not (hour.folder / "build" / "quickstart" / "export").exists() and "readme" not in (options.parts or PARTS):
            hour.works("python -m examples.quickstart")
        for name in options.parts or PARTS:
            print(f"== {name}", flush=True)
            PARTS[name](hour)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = f"{(time.monotonic() - started) / 60:.0f} minutes, {(used.ru_utime + used.ru_stime) / 60:.0f} of processors"
    print(f"{len(hour.failed)} steps failed; {took}")
    sys.exit(bool(hour.failed))


def cloned(folder: Path) -> Path:
    """Clones what is committed."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


# ---- the parts -------------------------------------------------------------------------------------------------------


def readme(hour: Hour) -> None:
    """Runs the command lines of the README in their order, and then its program."""
    page = hour.folder / "README.md"
    for _, command in commands_that_run(blocks(page, "sh")):
        hour.works(command_read_as(command))
    for block in blocks(page, "python"):
        (hour.folder / "program.py").write_text(read_as(block.text))
        hour.works(f"python program.py  # {page.name}:{block.line}")


def examples(hour: Hour) -> None:
    """Runs every example for a few steps."""
    torch_run = "torchrun --standalone --nproc-per-node=2"
    for path in sorted((hour.folder / "examples").glob("*.yaml")):
        if path.stem not in ("quickstart", "vision", *(() if torch.cuda.is_available() else GPUS_ONLY)):
            hour.works(f"lightning-automodel fit --config=examples/{path.name} {STEPS}")
    for name in ("dpo", "distillation", "reward", "fabric"):
        hour.works(f"python -m examples.{name}")
    hour.works("python -m examples.vision --trainer.max_epochs=1")
    hour.works("python -m examples.finetune build/quickstart/export 'build/quickstart/text/a*.py'")
    hour.works(f"{torch_run} examples/torchrun.py build/quickstart/export --steps=2")
    hour.works(f"examples/torchrun.sh examples/full.yaml {STEPS}")
    hour.works("jupyter execute examples/notebook.ipynb")


def mistakes(hour: Hour) -> None:
    """Runs wrong commands, and looks at what they say, how they end, and how long that takes."""
    (hour.folder / "build").mkdir(exist_ok=True)
    (hour.folder / "build" / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    imports = min(hour.run(f'python -W ignore -c "{IMPORTS}"')[2] for _ in range(2))
    print(f"        {imports:4.1f} s of processor time for the imports of libraries alone")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (command, text), (code, printed, seconds) in zip(
            MISTAKES.items(), pool.map(hour.run, MISTAKES), strict=True
        ):
            lines = printed.splitlines()
            told = [line for line in lines if line.startswith("lightning-automodel: error: ")]
            right = code == 1 and told == lines[-1:] and text in told[0] and "Traceback" not in printed
            own = seconds - imports
            hour.say(right and own < SECONDS, f"{seconds:4.1f} s (own: {own:4.1f})  {command}", printed[-3000:])


def documents(hour: Hour) -> None:
    """Runs the command lines of each page in their order, beside a run.yaml of one's own."""
    for page in sorted((hour.folder / "docs").rglob("*.md")):
        for earlier in ("build/pages", "lightning_logs"):  # runs of a page are its own: version_0 is its first
            shutil.rmtree(hour.folder / earlier, ignore_errors=True)
        shutil.copy(hour.folder / "examples" / "full.yaml", hour.folder / "run.yaml")
        for block, line in commands_that_run(blocks(page, "sh")):
            command = command_read_as(line)
            trains = command.startswith("lightning-automodel fit ") and "max_steps" not in command
            hour.works(f"{command}{f' {STEPS_OF_PAGES}' if trains else ''}  # {page.name}:{block.line}")


PARTS: dict[str, Callable[[Hour], None]] = {
    "readme": readme,
    "examples": examples,
    "mistakes": mistakes,
    "pages": documents,
}


if __name__ == "__main__":
    main()
