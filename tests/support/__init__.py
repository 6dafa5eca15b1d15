"""What several tests and benchmarks share: tiny models, and the comparison of a layout with one process."""
