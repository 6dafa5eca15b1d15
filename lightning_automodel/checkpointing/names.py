"""Finds which models a checkpoint holds, by the names of weights in it, without reading them."""

import pickle
from collections.abc import Collection, Iterable

from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.hugging_face.description import descriptions_of
from lightning_automodel.checkpointing.states import clean_name


def holds_model(path: Location, needed: Iterable[str]) -> bool:
    """Tell whether a checkpoint surely holds a model with the weights ``needed``; not if it cannot be read, which
    loading it will say.

    Beside a model with adapters that is not sure: its frozen base is left out, and another model (the reference of
    DPO) has weights of the same names.
    """
    try:
        checkpoint = read_checkpoint(path)
        stored = {clean_name(name) for name in checkpoint["state_dict"]}
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError):
        return False
    has_adapters = any(description.adapters for description in descriptions_of(checkpoint))
    return not has_adapters and bool(prefixes_of(needed, stored))


def prefixes_of(needed: Iterable[str], stored: Collection[str]) -> list[str]:
    """Find what stands before all names of a model in a checkpoint: one prefix for each model that it may be."""
    needed = [clean_name(name) for name in needed]
    if not needed:
        return []
    candidates = sorted({name.removesuffix(needed[0]) for name in stored if name.endswith(needed[0])}, key=len)
    return [prefix for prefix in candidates if all(prefix + name in stored for name in needed)]
