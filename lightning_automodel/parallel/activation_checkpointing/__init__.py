"""Activation checkpointing: which blocks are computed again, and what of them is saved all the same."""
