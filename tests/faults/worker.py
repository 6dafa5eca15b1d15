"""What torchrun starts in the tests of restarts: python -m tests.faults.worker DIRECTORY TIMEOUT."""

import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.faults.chains import train


def main(directory: Path, seconds: float) -> None:
    """Trains, with a journal of its own; ``seconds`` is the timeout of collectives."""
    train({"timeout": timedelta(seconds=seconds)}, directory / "saved", directory / f"journal {time.time_ns()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
