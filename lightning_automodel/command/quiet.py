"""Keeps the command's output to what the user is told, once: no advertisements, and no line of every rank."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from lightning_automodel._compat.messages import leave_out_asides, leave_out_deprecations

_PER_RANK = ("lightning.fabric", "lightning.pytorch")  # loggers
_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")


def be_quiet() -> None:
    """Leaves out what is not about the run, and on all ranks but the first what each of them would say again."""
    leave_out_asides()
    if not is_first_process():
        leave_out_deprecations()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        for name in _PER_RANK:
            logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def warnings_only(*names: str) -> Iterator[None]:
    """Lets the loggers of these names say nothing below a warning; afterwards they speak as before."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def is_first_process() -> bool:
    """Tells whether this process is the first of the run, as far as its environment says."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
