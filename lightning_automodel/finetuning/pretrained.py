"""Turns names of pretrained models and tokenizers that lead nowhere into an error that says so."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def looked_up(name: str) -> Generator[None, None, None]:
    """Looks ``name`` up as transformers does within this context: a directory, or else a name on the hub.

    Raises:
        ValueError: if it finds neither; what it says then need not hold the name.
    """
    try:
        yield
    except OSError as error:
        if Path(name).expanduser().is_dir():
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name!r} is no directory (here: {Path.cwd()}), and the hub gave nothing of this name: {first} Check the "
            "path, or the name and the connection"
        ) from error
