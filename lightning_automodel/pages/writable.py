"""Finds folders that cannot be written to before time is spent on what would be written there."""

import contextlib
import os
import tempfile
from pathlib import Path


def check_folder(setting: str, folder: str | Path | None) -> None:
    """Writes and removes a file in ``folder``, or in what is there of it. Passes URLs.

    Raises:
        ValueError: naming ``setting``, the folder and the reason.
    """
    if folder is None or "://" in str(folder):
        return
    path = Path(folder).expanduser().absolute()
    made: list[Path] = []
    try:
        for part in [*reversed(path.parents), path]:
            if not part.exists():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{setting}={folder}: nothing can be written there ({error.strerror})") from None
    finally:
        for part in reversed(made):
            _remove_if_empty(part)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process writes there by now
        os.rmdir(folder)
