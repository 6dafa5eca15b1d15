"""How a layer stores the matrix that it multiplies with: as [out, in], or, in the lineage of GPT-2, as [in, out]."""

from torch import nn
from transformers.pytorch_utils import Conv1D

Matrix = nn.Linear | Conv1D

WIDTH_OF_VIEW = "nf"
"""Attribute of layers that store [in, out], by which they shape their output."""


def is_turned(module: nn.Module) -> bool:
    """Tell whether ``module`` stores its matrix as [in, out]."""
    return isinstance(module, Conv1D)


def in_features(module: Matrix) -> int:
    """Return the number of features that ``module`` reads."""
    return int(module.nx) if isinstance(module, Conv1D) else module.in_features


def out_features(module: Matrix) -> int:
    """Return the number of features that ``module`` gives."""
    return int(module.nf) if isinstance(module, Conv1D) else module.out_features
