"""Describes one call for the nursery, and where the ranks of the call leave their files."""

from dataclasses import dataclass
from pathlib import Path

MAX_RANKS = 64
MAX_MESSAGE = 1 << 16  # bytes between pool and nursery; functions, arguments and results travel by other ways


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call on all ranks, as the pool describes it to the nursery.

    Args:
        world_size: how many ranks to fork.
        port: of the rendezvous store that the pool holds for this call alone.
        directory: holds `call.pickle` and takes each rank's output and stacks.
        deadline: on the clock of `time.monotonic`, which all processes of a machine share.
        trainer: leave the process group to the function.
    """

    world_size: int
    port: int
    directory: Path
    deadline: float
    trainer: bool

    def payload(self) -> Path:
        """Returns the path of the pickled function and its arguments."""
        return self.directory / "call.pickle"

    def output(self, rank: int) -> Path:
        """Returns the path of what the rank writes to stdout and stderr."""
        return self.directory / f"rank{rank}.output"

    def stacks(self, rank: int) -> Path:
        """Returns the path of the Python stacks of the rank at the deadline."""
        return self.directory / f"rank{rank}.stacks"
