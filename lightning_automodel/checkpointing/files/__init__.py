"""The files of a checkpoint: written and read, complete or not there, on disk or behind a URL."""
