"""Finds which models a checkpoint holds, by the names of weights in it, without reading them."""

import pickle
from collections.abc import Collection, Iterable

from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.hugging_face.description import descriptions_of
from lightning_automodel.checkpointing.states import clean_name


def held_models(path: Location, needed: Iterable[str]) -> list[str]:
    """Find what stands before the names of each model in a checkpoint that surely has the weights ``needed``; none if
    it cannot be read, which loading it will say.

    Where another model was left out that is not sure, since it may have weights of the same names: of a model with
    adapters its frozen base, and of any (the reference of DPO) what the module's own hooks take out.
    """
    try:
        checkpoint = read_checkpoint(path)
        stored = {clean_name(name) for name in checkpoint["state_dict"]}
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError):
        return []
    if any(description.adapters or _lacks(stored, description.name) for description in descriptions_of(checkpoint)):
        return []
    return prefixes_of(needed, stored)


def _lacks(stored: Iterable[str], model: str) -> bool:
    start = clean_name(f"{model}.") if model else ""
    return not any(name.startswith(start) for name in stored)


def prefixes_of(needed: Iterable[str], stored: Collection[str]) -> list[str]:
    """Find what stands before all names of a model in a checkpoint: one prefix for each model that it may be."""
    needed = [clean_name(name) for name in needed]
    if not needed:
        return []
    candidates = sorted({name.removesuffix(needed[0]) for name in stored if name.endswith(needed[0])}, key=len)
    return [prefix for prefix in candidates if all(prefix + name in stored for name in needed)]
