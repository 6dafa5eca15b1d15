"""Every switch of memory and speed: the same numbers, and what it is worth."""
