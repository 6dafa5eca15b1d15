"""Nothing is printed before the first line about the run, and beside such lines, that is not the user's."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_automodel.command.quiet import be_quiet
from tests.docs.conftest import workspace

__all__ = ["workspace"]
COMMAND = Path(sys.executable).with_name("lightning-automodel")
ROOT = Path(__file__).resolve().parents[2]
TEXT = "--data.train_files=build/quickstart/text/abc.py"
FIT = ("fit", "--model.model=build/quickstart/model", TEXT, "--trainer.max_steps=1", "--trainer.accelerator=cpu")
NOISY = {  # what each of them makes libraries say
    "one rank": (*FIT, "--trainer.devices=1", "--trainer.precision=bf16-mixed"),
    "two ranks": (
        *(*FIT, "--trainer.devices=2", "--trainer.strategy.tp=2", "--trainer.strategy.config.sequence_parallel=true"),
        "--model.peft={r: 4, target_modules: all-linear}",
    ),
    "context": (*FIT, "--trainer.devices=2", "--trainer.strategy.cp=2"),
}
OTHERS = {
    "evaluate": ("evaluate", "build/quickstart/model", "--files=build/quickstart/text/abc.py"),
    "generate": ("generate", "build/quickstart/model", "--prompt=def", "--sampling.max_new_tokens=2"),
    "plan": ("plan", "--model=build/quickstart/model", "--world=2", "--tp=2", "--seq=16"),
}
OURS = """(train|val): .+ rows
[\\d,]+ of [\\d,]+ parameters train
LlamaForCausalLM: |cp=2:
this run$|  (strategy|parameters|precision|switches|steps|output) +
(loss|perplexity|rows): """
OF_LIGHTNING = """(\\[rank: 0\\] )?Seed set to 0|GPU available: |Initializing distributed: GLOBAL_RANK: 0|-+$
distributed_backend=gloo|All distributed processes registered
.*The number of training batches \\(\\d+\\) is smaller than the logging interval
.*Found \\d+ module\\(s\\) in eval mode
`Trainer.fit` stopped"""
OF_TRANSFORMERS = "(Loading|Writing) (weights|model shards)"
EXPECTED = re.compile("|".join("|".join((OURS, OF_LIGHTNING, OF_TRANSFORMERS)).splitlines()))


def printed(arguments: tuple[str, ...], workspace: Path) -> list[str]:
    """Lines on the standard error of a command that works, bars left out."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [str(COMMAND), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=workspace, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()]


@pytest.mark.long
@pytest.mark.parametrize("name", NOISY)
def test_a_run_prints_what_is_about_it(workspace: Path, name: str) -> None:
    lines = printed(NOISY[name], workspace)
    assert [line for line in lines if not EXPECTED.match(line)] == []
    assert [line for line in lines if not re.match(OF_TRANSFORMERS, line) and lines.count(line) > 2] == []
    assert lines.count("this run") == 1


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_commands_print_what_is_about_them(workspace: Path, name: str) -> None:
    lines = printed(OTHERS[name], workspace)
    assert [line for line in lines if not EXPECTED.match(line)] == []
    assert name == "evaluate" or lines == []


def test_only_what_is_not_about_the_run_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # other tests of this process may have been another,
    monkeypatch.setattr(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "filters", [])  # and more quiet
    with warnings.catch_warnings(record=True) as shown, caplog.at_level("INFO", logger="lightning.pytorch"):
        warnings.simplefilter("always")
        be_quiet()
        be_quiet()
        warnings.warn("Starting from v1.9.0, `tensorboardX` has been removed as a dependency", stacklevel=1)
        warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning, stacklevel=1)
        warnings.warn("`something_else` is deprecated and will be removed", FutureWarning, stacklevel=1)
        rank_zero_info("TPU available: False, using: 0 TPU cores")
        rank_zero_info("GPU available: False, used: False")
    assert [str(warning.message)[:17] for warning in shown] == ["`something_else` "]
    assert [record.getMessage() for record in caplog.records] == ["GPU available: False, used: False"]
    filters = logging.getLogger("lightning.pytorch.utilities.rank_zero").filters
    assert len(filters) == len(set(filters)) > 0


def test_other_ranks_do_not_repeat_what_libraries_warn_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        be_quiet()
        warnings.warn("`anything` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("this rank is slow", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["this rank is slow"]
