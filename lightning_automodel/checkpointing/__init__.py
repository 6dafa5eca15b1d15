"""Checkpoints: what a rank holds of each tensor, the folder on disk, and the way back into a model of any layout."""
