"""Tensors over ranks, without models: collectives, and which box of a tensor a rank holds."""
