"""Pure functions, in one process."""
