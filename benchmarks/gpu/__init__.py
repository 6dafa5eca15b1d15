"""A ladder of memory and speed on one CUDA device: `python -m benchmarks.gpu`."""
