"""A ladder of memory and speed on one CUDA device: `make bench-gpu`, or `python -m benchmarks.gpu --write --out DIR`.

The second form needs no virtual environment of this project and no network: packages may come through PYTHONPATH.

    python -m benchmarks.gpu --write --out DIR      page, figures and errors in DIR, written after each row
    python -m benchmarks.gpu --only 'LoRA, 1 x'     rows whose table or name contain this
    python -m benchmarks.gpu --smoke                the smallest form of the rows that have every lever, on a CPU
    python -m benchmarks.gpu.plan                   what the planner says of each row, without a GPU
    python -m pytest tests/gpu                      the tests on a GPU

Rows begin for 8 minutes (`--minutes`); those that are left are shown as not measured.

What is needed beside torch (2.11 to 2.15) and what torch brings, of the versions in constraints.txt, for Python 3.12 on
x86-64 Linux 54 MiB of wheels: the package's own dependencies (jsonargparse, lightning, torchmetrics, transformers,
zlib-ng, and what they ask for), numpy, peft for adapters, torchao for float8; for the tests megatron-fsdp with einops,
pytest and pytest-timeout; liger-kernel (of any version) for the row with Liger's loss. Whatever is missing costs the
rows or tests that need it.
"""
