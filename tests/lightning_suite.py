"""Runs Lightning's own tests with the strategies of this package, and lists what fails with them and passes with
Lightning's ``DDPStrategy``::

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning checkout
    python -m tests.lightning_suite checkout --folders core loops/test_loops.py --results results

Wherever a test leaves ``strategy="auto"`` on one CPU device, the strategy takes the place of Lightning's choice. What
fails is run again with Lightning's. Results are kept, so that a run that is stopped goes on; a test that ends the
process counts as one that fails.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_automodel import DDPStrategy, FSDP2TPStrategy

REFERENCE = "Lightning's DDPStrategy"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FSDP2TPStrategy": lambda: FSDP2TPStrategy(save_distributed_checkpoint=False),
    "DDPStrategy": DDPStrategy,
}
FOLDERS = ("trainer", "callbacks", "checkpointing", "core", "loggers", "loops", "models", "tuner", "utilities")
_VARIABLE = "LIGHTNING_SUITE"  # how the plugin in the test process gets its task
_STARTED = "crashed"  # until an outcome follows
FAILED = ("failed", _STARTED)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Lightning's repository, at the release that is installed")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="or files, below tests/tests_pytorch")
    parser.add_argument(
        "--results", type=Path, default=Path("lightning_suite"), help="what is known already, by folder"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--again", action="store_true", help="forget what failed with ours")
    parser.add_argument("--timeout", type=int, default=60, help="seconds per test")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for name in options.strategies:
        for folder in options.folders:
            found = run(options, folder, name, None)
            failed = [test for test, (outcome, _) in found.items() if outcome in FAILED]
            run(options, folder, REFERENCE, failed)
    report = "\n".join(differences(options.results))
    (options.results / "report.md").write_text(report + "\n")
    print(report)


def run(options: argparse.Namespace, folder: str, name: str, wanted: list[str] | None) -> dict[str, tuple[str, str]]:
    """Outcome and message by test.

    Args:
        options: of the command line.
        folder: of tests, or a file.
        name: of the strategy.
        wanted: tests to run; ``None``: all.
    """
    journal = (options.results / f"{folder.replace('/', '.')}.{name}.jsonl").resolve()
    complete = journal.with_suffix(".complete")
    if options.again and name != REFERENCE and journal.is_file():
        _forget_failures(journal, complete)
    while wanted is not None or not complete.exists():
        known = read(journal)
        if wanted is not None and set(wanted) <= known.keys():
            break
        task = {"strategy": name, "journal": str(journal), "wanted": wanted, "known": sorted(known)}
        code = _pytest(options, folder, task)
        if code in (0, 1, 5):  # all pass, some fail, none is left
            if not read(journal):
                raise RuntimeError(f"no test of {folder} can be collected; see above for what it imports")
            complete.touch()
            break
        if read(journal).keys() == known.keys():
            raise RuntimeError(f"pytest ended with {code} before any test of {folder} began")
    return read(journal)


def _forget_failures(journal: Path, complete: Path) -> None:
    known = read(journal)
    lines = [(test, *found) for test, found in known.items() if found[0] not in FAILED]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if len(lines) < len(known):
        complete.unlink(missing_ok=True)


def _pytest(options: argparse.Namespace, folder: str, task: dict[str, Any]) -> int:
    tests = options.checkout.resolve() / "tests"
    task_file = options.results.resolve() / "task.json"
    task_file.write_text(json.dumps(task))
    paths = [str(Path(__file__).parents[1]), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), _VARIABLE: str(task_file)}
    quiet = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.lightning_suite"]
    limits = ["--timeout", str(options.timeout), "--timeout-method=signal", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *quiet, *limits, f"tests_pytorch/{folder}"]
    return subprocess.run(command, cwd=tests, env=environment, check=False).returncode


def read(journal: Path) -> dict[str, tuple[str, str]]:
    """Outcome and message by test."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    return {test: (outcome, message) for test, outcome, message in lines}


def differences(results: Path) -> list[str]:
    """The report: per strategy of ours, what fails of that which passes with the reference."""
    reference = _everything(results, REFERENCE)
    lines = []
    for name in STRATEGIES:
        found = _everything(results, name)
        passed = sum(outcome == "passed" for outcome, _ in found.values())
        worse = {t: f for t, f in found.items() if f[0] in FAILED and reference.get(t, ("",))[0] == "passed"}
        lines += [f"# {name}: {passed} tests pass, {len(worse)} fail that pass with {REFERENCE}", ""]
        lines += [f"- {outcome}: `{test}`\n  {message}" for test, (outcome, message) in worse.items()]
        lines.append("")
    return lines


def _everything(results: Path, name: str) -> dict[str, tuple[str, str]]:
    return {test: found for path in sorted(results.glob(f"*.{name}.jsonl")) for test, found in read(path).items()}


# ---- the plugin of the test process ----------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Starts the task that the environment names."""
    if _VARIABLE in os.environ:
        config.addinivalue_line("markers", "flaky(reruns): of pytest-rerunfailures, which need not be there")
        config.pluginmanager.register(Task(json.loads(Path(os.environ.pop(_VARIABLE)).read_text())))


class Task:
    """Puts the strategy in place, chooses the tests and writes down what becomes of each."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.wanted: list[str] | None = task["wanted"]
        self.known = set(task["known"])
        self.journal = Path(task["journal"])
        replace_single_device(STRATEGIES.get(task["strategy"], LightningDDPStrategy))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves what is wanted and not known."""
        wanted = None if self.wanted is None else set(self.wanted)
        items[:] = [i for i in items if i.nodeid not in self.known and (wanted is None or i.nodeid in wanted)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """What stands here alone has ended the process."""
        self._write(item.nodeid, _STARTED, "")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst of set-up, call and tear-down."""
        known = read(self.journal)[report.nodeid][0]
        if report.outcome != "passed" or (report.when == "call" and known == _STARTED):
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write(report.nodeid, report.outcome, str(getattr(crash, "message", ""))[:400])

    def _write(self, *entry: str) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def replace_single_device(build: Callable[[], Strategy]) -> None:
    """Lets every trainer that would choose one CPU device by itself use ``build()``."""
    original = _AcceleratorConnector._choose_strategy

    def choose(self: _AcceleratorConnector) -> Strategy | str:
        chosen = original(self)
        is_cpu = isinstance(chosen, SingleDeviceStrategy) and chosen.root_device.type == "cpu"
        return build() if is_cpu else chosen

    _AcceleratorConnector._choose_strategy = choose  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
