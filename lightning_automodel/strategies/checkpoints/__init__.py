"""What Lightning saves and loads, through ``checkpointing``."""
