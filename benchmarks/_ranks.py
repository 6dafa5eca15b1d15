"""What the benchmarks of loading and saving share: a model on disk, ranks, and the memory of one."""

import os
import platform
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

GB = 10**9


def config(layers: int) -> LlamaConfig:
    """A Llama of 131 + 47 x layers million parameters."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32_000,
        tie_word_embeddings=False,
        use_cache=False,
    )


def write_model(directory: Path, layers: int) -> int:
    """Saves a model with arbitrary bfloat16 weights, in files of about 200 MB; returns its bytes."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(directory, max_shard_size="200MB")
    return sum(p.nbytes for p in model.parameters())


def describe_machine() -> str:
    """For the head of a table."""
    return (
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, gloo, one thread per rank; torch "
        f"{torch.__version__}, transformers {transformers.__version__}"
    )


class Memory:
    """Memory of this process while a block runs, above what it held before.

    Attributes:
        own: peak of anonymous memory in bytes, looked at every 2 ms: what no file backs.
        resident: peak of all resident memory in bytes, pages of memory-mapped files included.
        seconds: wall clock.
    """

    def __init__(self) -> None:
        self.own = 0
        self.resident = 0
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Generator["Memory", None, None]:
        """Fills the attributes."""
        own, resident = _status("RssAnon"), _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                self.own = max(self.own, _status("RssAnon") - own)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        try:
            yield self
        finally:
            self.seconds = time.perf_counter() - start
            done.set()
            watcher.join()
            self.resident = _status("VmHWM") - resident


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def timed(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
