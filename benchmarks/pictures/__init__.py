"""Makes what the docs show of a run: pages, the bar of steps, the terminal. None of it is a benchmark."""
