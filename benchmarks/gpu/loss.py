"""Cross entropy of logits and their gradient on one CUDA device: torch's, ours kernel by kernel, ours compiled.

`python -m benchmarks.gpu.loss` prints a line for each: milliseconds of both passes, and of the first. `--smoke` runs
the smallest form, on the CPU where there is no CUDA device.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_automodel.loss.functional import IGNORE_INDEX, flat_losses
from lightning_automodel.loss.passes import compiled_passes

WARM, STEPS = 2, 7
WHOLE, SMALLEST = (8192, 128_256), (16, 64)


def main() -> None:
    """Entry point of ``python -m benchmarks.gpu.loss``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.loss", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="the smallest form")
    smoke = parser.parse_args().smoke
    if not smoke and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; --smoke runs its smallest form on the CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, vocabulary = SMALLEST if smoke else WHOLE
    logits = torch.randn(tokens, vocabulary, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    passes = compiled_passes("inductor", None)
    ways: dict[str, Callable[[], Tensor]] = {
        "torch's cross entropy": lambda: cross_entropy(logits.float(), targets),
        "kernel by kernel": lambda: flat_losses(logits, targets, IGNORE_INDEX, 0.0).mean(),
        "compiled": lambda: flat_losses(logits, targets, IGNORE_INDEX, 0.0, passes).mean(),
    }
    print(f"{tokens} x {vocabulary} logits, bfloat16, {device}, torch {torch.__version__}")
    for name, loss in ways.items():
        both, forward = measure(loss, logits, device)
        print(f"{name:24} {1e3 * both:8.2f} ms, of which {1e3 * forward:6.2f} in the forward pass", flush=True)


def measure(loss: Callable[[], Tensor], logits: Tensor, device: str) -> tuple[float, float]:
    """Seconds of both passes and of the first, medians."""
    found: list[tuple[float, float]] = []
    for _ in range(WARM + STEPS):
        logits.grad = None
        start = clock(device)
        value = loss()
        between = clock(device)
        value.backward()
        found.append((clock(device) - start, between - start))
    both, forward = zip(*found[WARM:], strict=True)
    return median(both), median(forward)


def clock(device: str) -> float:
    """Seconds, when the device has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
