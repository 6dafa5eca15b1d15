"""The public door to cross entropy from hidden states: ``chunked_linear_cross_entropy``."""

from lightning_automodel.loss.chunked import chunked_linear_cross_entropy

__all__ = ["chunked_linear_cross_entropy"]
