"""Mixes sources: how often the documents of each come in an epoch."""

from collections.abc import Mapping

import numpy as np

from lightning_automodel.finetuning.sources import Source, find_sources

Files = str | list[str] | dict[str, float]


def sources_of(files: Files) -> list[Source]:
    """Find the sources that ``files`` names, each once."""
    return find_sources(list(files) if isinstance(files, Mapping) else files)


def weights_of(files: Files) -> dict[str, float]:
    """Return the weight of each source by its name; 1 where none is given.

    Raises:
        ValueError: if a weight is not positive, or a source has two.
    """
    if not isinstance(files, Mapping):
        return {source.name: 1.0 for source in find_sources(files)}
    weights: dict[str, float] = {}
    for pattern, weight in files.items():
        if not weight > 0:
            raise ValueError(f"{pattern!r} has the weight {weight}; give the times that its documents come in an epoch")
        for source in find_sources(pattern):
            if source.name in weights:
                raise ValueError(f"{source.name} is named by several patterns of the mixture; name it once")
            weights[source.name] = float(weight)
    return weights


def repeat(documents: np.ndarray, weights: np.ndarray, seed: int) -> np.ndarray:
    """Repeat documents by their weights.

    Args:
        documents: int [n], their numbers.
        weights: float [n]; 2.25 is twice, and a quarter of those with this weight once more.
        seed: of the choice of that quarter.

    Returns:
        int [m], sorted.
    """
    times = np.floor(weights).astype(np.int64)
    generator = np.random.default_rng(seed)
    for weight in np.unique(weights):
        same = np.flatnonzero(weights == weight)
        extra = round(len(same) * (weight % 1))
        times[generator.permutation(same)[:extra]] += 1
    return np.repeat(documents, times)
