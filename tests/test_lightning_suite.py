"""The runner of Lightning's tests, on a checkout of three tests."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

def ours():
    return Trainer(accelerator="cpu", devices=1, logger=False).strategy

def test_same():
    assert isinstance(ours(), DDPStrategy)

def test_worse():
    assert type(ours()).__module__.startswith("lightning.")

def test_ends_the_process():
    if not type(ours()).__module__.startswith("lightning."):
        os._exit(3)
"""


@pytest.mark.long
def test_the_report_lists_what_lightnings_strategy_passes(tmp_path: Path) -> None:
    folder = tmp_path / "tests/tests_pytorch/loops"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text(TESTS)
    options = ["--folders", "loops", "--strategies", "DDPStrategy", "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "tests.lightning_suite", str(tmp_path), *options]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "# DDPStrategy: 1 tests pass, 2 fail that pass with Lightning's DDPStrategy" in report
    assert "- failed: `tests_pytorch/loops/test_x.py::test_worse`" in report
    assert "- crashed: `tests_pytorch/loops/test_x.py::test_ends_the_process`" in report
