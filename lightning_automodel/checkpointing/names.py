"""Finds the names of weights that a checkpoint holds, without reading them."""

import pickle
from collections.abc import Iterable

from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.states import clean_name


def stored_names(path: Location) -> set[str]:
    """Lists the names in ``state_dict``; none if the checkpoint cannot be read, which loading it will say."""
    try:
        return {clean_name(name) for name in read_checkpoint(path)["state_dict"]}
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError):
        return set()


def prefix_of(needed: Iterable[str], stored: set[str]) -> str | None:
    """Finds what stands before all names of a model in a checkpoint; ``None`` if it does not hold all of them."""
    needed = [clean_name(name) for name in needed]
    if not needed:
        return None
    candidates = sorted({name.removesuffix(needed[0]) for name in stored if name.endswith(needed[0])}, key=len)
    return next((prefix for prefix in candidates if all(prefix + name in stored for name in needed)), None)
