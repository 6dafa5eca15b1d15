"""A ladder of memory and speed on one CUDA device: `make bench-gpu`, and docs/gpu.md for a machine without a network.

    python -m benchmarks.gpu --out DIR              page, figures and errors in DIR, row by row; again: it goes on
    python -m benchmarks.gpu --only 'LoRA, 1 x'     rows whose table or name contain this
    python -m benchmarks.gpu --page DIR             the page in docs/ of what another machine left in DIR
    python -m benchmarks.gpu --profile              adds to rows.json the kernels that take the time of a step
    python -m benchmarks.gpu --smoke                the smallest form of the rows that have every lever, on a CPU
    python -m benchmarks.gpu.plan                   what the planner says of each row, without a GPU

docs/gpu.md says what to install, in which order to run it, and what the targets are.
"""
