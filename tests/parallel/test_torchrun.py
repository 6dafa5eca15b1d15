"""The example of a plain loop runs under torchrun, and two processes print what one prints."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from examples import torchrun
from lightning_automodel.testing.pool import Nursery, Pool

EXAMPLE = Path(torchrun.__file__)
STEPS = "--steps=3"


def printed() -> str:
    """Runs on one rank, which is what torchrun starts, but for the imports."""
    with contextlib.redirect_stdout(io.StringIO()) as output, patch.object(sys, "argv", [str(EXAMPLE), STEPS]):
        torchrun.main()
    return output.getvalue()


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", text)]


@pytest.mark.long  # `make first-hour` runs the example, too
def test_two_processes_print_the_numbers_of_one(nursery: Nursery) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE), STEPS]
    two = subprocess.run(command, text=True, capture_output=True, timeout=100)
    assert two.returncode == 0, two.stderr
    (text,) = Pool(nursery, 1).run(printed, trainer=True)
    one = numbers(text)
    assert len(one) == 6
    assert one[4] < one[0]
    assert numbers(two.stdout) == pytest.approx(one, abs=2e-4)
