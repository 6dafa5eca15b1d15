"""Losses and numbers from logits: against float64 references, and against one process."""
