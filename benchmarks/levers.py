"""What each lever of memory and speed buys: time, memory and collectives of a step. Writes docs/levers.md.

Each row trains the same model on the same batch, against the row above it that is called default. Time is the median
of alternating runs. Memory is the peak of all tensors of a step, without the parameters that a rank stores. Collectives
are counted as they are dispatched, with the larger of what goes in and what comes out; an all-reduce moves it twice.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.shards import local_tensor
from tests.harness.pool import Nursery, Pool
from tests.levers.collectives import Collectives

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "levers.md"
MIB = 2**20
WARM = 2


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A row of the table.

    Attributes:
        fields: of ``FSDP2Config``.
        when: when to use it, in two sentences.
        micro_batches: of a step.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    micro_batches: int = 1


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
LEVERS: dict[str, dict[str, Lever]] = {
    "tp": {
        "default": Lever(),
        "sequence_parallel": Lever(
            fields={"sequence_parallel": True},
            when="Turn it on whenever tp is greater than 1 and sequences are long: what lies between the layers "
            "takes 1/tp of its memory. It moves as many bytes as without, in twice as many collectives.",
        ),
        "activation_checkpointing full": Lever(
            fields={"activation_checkpointing": "full"},
            when="Use it when activations do not fit: a block keeps its input only, and its forward pass runs twice."
            " With tp it also repeats one of the two sums of a block.",
        ),
        "activation_checkpointing selective": Lever(
            fields={"activation_checkpointing": "selective"},
            when="Use it when full checkpointing is more than you need: attention and every second matrix product "
            "are not computed again. A list such as ['attention', 'matmul'] says exactly what is kept.",
        ),
        "activation_checkpointing submodule": Lever(
            fields={"activation_checkpointing": "submodule"},
            when="Attention, feed-forward and norms are computed again one by one, so the peak of the backward pass "
            "is that of one of them. Use it when a whole block at a time is too much.",
        ),
        "full, with sequence_parallel": Lever(
            fields={"activation_checkpointing": "full", "sequence_parallel": True},
            when="The least memory for activations: what a block keeps is cut over tp as well. The way to train long"
            " sequences.",
        ),
        "chunked_loss": Lever(
            fields={"chunked_loss": 128},
            when="Use it for large vocabularies: logits exist for one chunk of tokens at a time. It is often the "
            "first lever to turn, see docs/loss_memory.md.",
        ),
        "mp_policy bf16": Lever(
            fields={"mp_policy": BF16},
            when="The usual precision of training on GPUs, and what Trainer(precision='bf16-mixed') sets: parameters"
            " are stored in float32, and gathered and used in bfloat16. On CPUs without bfloat16 units it is "
            "slower.",
        ),
        "autocast_dtype, float32 stream": Lever(
            fields={"mp_policy": {**BF16, "output_dtype": "float32"}, "autocast_dtype": "bfloat16"},
            when="Use it when bfloat16 loses too much in the residual sums of deep models: these stay in float32, "
            "and matrix products in bfloat16. It costs memory for the stream, and a cast per operation.",
        ),
        "enable_compile": Lever(
            fields={"enable_compile": True},
            when="Turn it on for long runs: blocks that are alike are compiled once, in the first step, and fused. "
            "Not worth it for a few steps, or for batches whose kind changes all the time.",
        ),
    },
    "dp_shard": {
        "default": Lever(),
        "reshard_after_forward False": Lever(
            fields={"reshard_after_forward": False},
            when="Use it when parameters fit gathered: the backward pass does not gather them again. The opposite, "
            "True, also frees the last block, which is needed first in the backward pass.",
        ),
        "enable_fsdp2_prefetch False": Lever(
            fields={"enable_fsdp2_prefetch": False},
            when="Leave it on: the next blocks are gathered while one computes. Off, FSDP2 gathers one block ahead "
            "in the backward pass only, which needs the least memory.",
        ),
        "prefetch depths 2 and 3": Lever(
            fields={"fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 3},
            when="Raise them when a profile shows that compute waits for gathers. Each step is one more gathered "
            "block in memory.",
        ),
        "fsdp2_min_num_params, units of 3 blocks": Lever(
            fields={"fsdp2_min_num_params": 2_000_000},
            when="Use it for models of many small blocks, and for many ranks, where gathers are all latency: several "
            "blocks share one. Their parameters are whole in memory together, so a unit should stay small beside the "
            "activations.",
        ),
        "two micro-batches": Lever(
            micro_batches=2,
            when="With accumulation gradients are reduced once per step, and unreduced gradients of the whole model "
            "wait on every rank. The next row is to be compared with this one.",
        ),
        "two micro-batches, defer_fsdp_grad_sync False": Lever(
            fields={"defer_fsdp_grad_sync": False},
            micro_batches=2,
            when="Use it when unreduced gradients do not fit: they are reduced at every micro-batch, and a rank "
            "keeps its own part. It costs one reduction more per micro-batch.",
        ),
    },
}


ON_GPUS = {
    "offload_policy": (
        "Use it when parameters and the states of the optimizer do not fit: they wait on the host, and the "
        "optimizer steps there. Each gather then crosses the bus, so it is the last lever to turn."
    ),
    "activation_offload": (
        "Use it with full checkpointing when even the inputs of blocks do not fit: they wait on the host. "
        "Worth it where a block computes longer than its input takes to copy."
    ),
    "enable_async_tensor_parallel": (
        "Use it with enable_compile on GPUs that are linked: what sequence parallelism, which it turns on, "
        "communicates runs beside the matrix products. It needs large batches to win."
    ),
    "float8": (
        "Use it with enable_compile on GPUs from Ada and Hopper on, for models with large matrices: "
        "docs/precision.md. Numbers differ from bfloat16 by what float8 resolves."
    ),
    "patch_is_packed_sequence": (
        "Use it with flash attention when rows are single documents: no layer then waits to find that out. "
        "Wrong for packed rows."
    ),
}
"""Levers that a CPU cannot show, and when to use them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row")
    parser.add_argument("--only", default="", help="rows whose names contain this, and the defaults")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    arguments = parser.parse_args()
    nursery = Nursery()
    lines = [*describe()]
    print("\n".join(lines), flush=True)
    try:
        for line in table(Pool(nursery, 2), arguments.rounds, arguments.only):
            print(line, flush=True)
            lines.append(line)
    finally:
        nursery.close()
    if arguments.write:
        DOCUMENT.write_text("\n".join([*lines, "", "## When to use them", "", *sentences()]) + "\n")


def describe() -> Iterator[str]:
    yield "# Levers"
    yield ""
    yield (__doc__ or "").partition("\n\n")[2].strip()
    yield ""
    config = model_config()
    yield (
        f"Llama, hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, a row "
        f"of {TOKENS} tokens, float32, 2 ranks with one thread each on CPU ({platform.machine()}, gloo), torch "
        f"{torch.__version__}, transformers {transformers.__version__}. Written by `python -m benchmarks.levers "
        "--write`. On GPUs times differ: a CPU hides no communication behind compute. What watches memory and "
        "collectives switches compiled blocks off, so these are not measured for them."
    )
    yield ""


def sentences() -> Iterator[str]:
    for levers in LEVERS.values():
        for name, lever in levers.items():
            if lever.when:
                yield f"- **{name}**: {lever.when}"
    yield from (f"- **{name}** (not measured on CPU): {when}" for name, when in ON_GPUS.items())


TOKENS = 512


def model_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        use_cache=False,
    )


def table(pool: Pool, rounds: int, only: str) -> Iterator[str]:
    yield "| 2 ranks | lever | step time | peak memory | collectives | MiB moved |"
    yield "|---|---|---|---|---|---|"
    for layout, levers in LEVERS.items():
        chosen = {name: lever for name, lever in levers.items() if not lever.when or only in name}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
        for _ in range(rounds):
            for name, lever in chosen.items():
                found[name].append(pool.run(measure, layout, lever, timeout=600)[0])
        base = {key: statistics.median(run[key] for run in found["default"]) for key in found["default"][0]}
        for name, runs in found.items():
            seconds = statistics.median(run["seconds"] for run in runs)
            peak, count, moved = (runs[0][key] for key in ("peak", "count", "bytes"))
            if name == "default":
                cells = f"{1e3 * seconds:.0f} ms | {peak / MIB:.0f} MiB"
            else:
                cells = f"{seconds / base['seconds']:.2f} | {peak / base['peak']:.2f}"
            cells += f" | {count:.0f} | {moved / MIB:.1f}"
            if chosen[name].fields.get("enable_compile"):
                cells = f"{seconds / base['seconds']:.2f} | | |"
            yield f"| {layout}=2 | {name} | {cells} |"


def measure(layout: str, lever: Lever) -> dict[str, float]:
    """Runs on each rank."""
    mesh = build_mesh(resolve_sizes(2, **{layout: 2}), "cpu")
    torch.manual_seed(0)
    model: Any = parallelize(LlamaForCausalLM(model_config()), mesh, FSDP2Config(**lever.fields)).train()
    groups = {name: axis(mesh, name).get_group() for name in (DP_REPLICATE, DP_SHARD_CP, TP)}
    times = []
    for _ in range(WARM + 5):
        dist.barrier()
        before = time.perf_counter()
        step(model, lever)
        times.append(time.perf_counter() - before)
    with Collectives(groups) as collectives:
        step(model, lever)
    with Peak(model) as memory:
        step(model, lever)
    return {
        "seconds": statistics.median(times[WARM:]),
        "peak": memory.peak,
        "count": sum(collectives.found["count"].values()),
        "bytes": sum(n * (2 if "all-reduce" in key else 1) for key, n in collectives.found["bytes"].items()),
    }


def step(model: Any, lever: Lever) -> None:
    ids = torch.randint(8192, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    for i in range(lever.micro_batches):
        last = i == lever.micro_batches - 1
        model.set_requires_gradient_sync(last or not lever.fields.get("defer_fsdp_grad_sync", True))
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


class Peak(TorchDispatchMode):
    """The most bytes of tensors that are alive at a time inside of this mode, without what a rank stores of ``model``.

    Memory that FSDP2 gathers into is from an earlier step: it is emptied and filled again, so sizes are those of now.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stored = {local_tensor(p).untyped_storage()._cdata for p in model.parameters()}
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if type(value) is Tensor:
                storage = value.untyped_storage()
                if storage._cdata not in self.stored:
                    self.alive.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, sum(self._bytes()))
        return result

    def _bytes(self) -> Iterator[int]:
        for key, ref in list(self.alive.items()):
            if ref.expired():
                del self.alive[key]
            else:
                yield torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()


if __name__ == "__main__":
    from benchmarks import levers  # by its own name: ranks must be able to import what they run

    levers.main()
