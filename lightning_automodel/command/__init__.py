"""What the command does beside training: mistakes in one line, and what is done with checkpoints."""
