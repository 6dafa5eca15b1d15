"""Runnable examples; each module says what it shows."""
