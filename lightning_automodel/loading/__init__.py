"""Weights into a model that is perhaps sharded: each rank reads or draws them, and keeps its own part."""

from lightning_automodel.loading.initialize import broadcast_weights, cast_parameters, materialize
from lightning_automodel.loading.pretrained import sharded_loading

__all__ = ["broadcast_weights", "cast_parameters", "materialize", "sharded_loading"]
