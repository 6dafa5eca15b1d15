"""Evaluation in which data ranks have different numbers of batches."""
