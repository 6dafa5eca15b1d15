"""Random numbers of parallel models: those of a forward pass, and those that users draw on shards."""
