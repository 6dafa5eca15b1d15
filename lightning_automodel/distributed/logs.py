"""Messages that appear once per process group, on rank 0."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_only


class _UnlessConfigured(logging.StreamHandler):
    """Writes to stderr where the user configured no logging, as Lightning does."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


logger = logging.getLogger("lightning_automodel")
logger.setLevel(logging.INFO)
logger.addHandler(_UnlessConfigured())
_seen: set[str] = set()
_rehearsing = False


@contextmanager
def rehearsal() -> Generator[None, None, None]:
    """Logs nothing within this context: what is done on a copy is said when it is done on the model itself."""
    global _rehearsing
    before, _rehearsing = _rehearsing, True
    try:
        yield
    finally:
        _rehearsing = before


@rank_zero_only
def log(message: str) -> None:
    """Log ``message`` at level INFO on rank 0."""
    if not _rehearsing:
        logger.info(message)


@rank_zero_only
def log_once(message: str) -> None:
    """Logs ``message`` at level INFO, the first time only."""
    if message not in _seen and not _rehearsing:
        _seen.add(message)
        logger.info(message)


@rank_zero_only
def warn_once(message: str) -> None:
    """Warns with ``message``, the first time only."""
    if message not in _seen:
        _seen.add(message)
        warnings.warn(message, stacklevel=3)
