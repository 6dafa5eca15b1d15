"""The example of a plain loop runs under torchrun, and two processes print what one prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun.py"


def start(processes: int) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*torchrun, str(EXAMPLE), "--steps=3"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_processes_print_the_numbers_of_one() -> None:
    running = [start(1), start(2)]
    numbers = []
    for process in running:
        output, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
        numbers.append([float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", output)])
    one, two = numbers
    assert len(one) == 6
    assert one[4] < one[0]
    assert two == pytest.approx(one, abs=2e-4)
