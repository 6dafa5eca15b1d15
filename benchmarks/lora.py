"""LoRA beside full fine-tuning and beside plain peft on one process: memory, time of a step, memory while loading.

Writes docs/lora.md.

A Llama is read from files by every rank and gets adapters on all linear layers, as in ``configure_model``; then it
takes AdamW steps, in turn with the same model without adapters. Time is the median of these, with quartiles. Memory is
what tensors of a rank hold at the peak of a step, the same in every step. Its bound is the rank's part of the base,
adapters with their gradients and both moments, and what autograd saves for the backward pass. Loading is the peak of a
process's own memory (no file backs it) until the model is parallel, against the rank's part of base and adapters.
Beside stacked experts plain peft adds adapters to the weights of all experts; on a mesh rows pass through them.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks._measure import Memory, between, describe_machine
from benchmarks._model_on_disk import GB, write_model
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from benchmarks.levers import Peak
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.support.files import read_and_adapt

MIB = 2**20
TOKENS, ROWS, WARM, STEPS, RANK = 128, 2, 1, 3, 8
LAYERS_TO_LOAD = 4
BOTH: dict[str, Any] = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, vocab_size=2048)
SIZES: dict[str, Any] = BOTH | dict(intermediate_size=704, num_hidden_layers=16)
EXPERTS: dict[str, Any] = BOTH | dict(
    moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4, num_hidden_layers=8
)
SWITCHES: dict[str, Any] = dict(tie_word_embeddings=False, use_cache=False)
ON_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "mesh of one rank": {"tp": 1},
    "tp=2": {"tp": 2},
    "dp_shard=2": {"dp_shard": 2},
    "dp_shard=2 x tp=2": {"dp_shard": 2, "tp": 2},
}

ON_ALL = LoraConfig(r=RANK, target_modules="all-linear")


def main() -> None:
    """Entry point of ``python -m benchmarks.lora``."""
    page = Page("lora.md", "lora")
    parser = page.parser(__doc__)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"], help="of the first table")
    arguments = parser.parse_args()
    layers = 2 if arguments.smoke else arguments.layers
    page.add(describe(layers))
    with shared_nursery() as nursery:
        with tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**of_depth(SIZES, layers), **SWITCHES)).save_pretrained(directory)
            for name, sizes in LAYOUTS.items():
                ranks = Pool(nursery, prod(sizes.values())).run(measure, directory, sizes, timeout=600)
                page.add(row(name, *found) for found in zip(("LoRA", "all"), *ranks, strict=True))
        with tempfile.TemporaryDirectory() as directory:
            layers = min(layers, EXPERTS["num_hidden_layers"])
            config = Qwen3MoeConfig(**of_depth(EXPERTS, layers), **SWITCHES)
            Qwen3MoeForCausalLM(config).save_pretrained(directory)
            page.add(["", *REMARKS, *describe_experts(layers)])
            for name, sizes in LAYOUTS.items():
                ranks = Pool(nursery, prod(sizes.values())).run(measure_experts, directory, sizes, timeout=600)
                page.add([f"| {name} | {cells(ranks)} |"])
        with tempfile.TemporaryDirectory() as directory:
            size = write_model(Path(directory), 1 if arguments.smoke else LAYERS_TO_LOAD)
            page.add(["", *describe_loading(size)])
            for name, sizes in LAYOUTS.items():
                if prod(sizes.values()) > 1:
                    loaded = Pool(nursery, prod(sizes.values())).run(measure_loading, directory, sizes, timeout=600)
                    page.add([row_of_loading(name, loaded)])
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    ratio = max(float(row[-1]) for row in tables[0].rows if row[-1])
    return f"LoRA holds at most {ratio:.2f} of base, adapters and activations at the peak of a step"


REMARKS = [
    "What is above the bound with `dp_shard` are the blocks that FSDP2 holds gathered: the one that computes, the",
    "next, and embedding and head. Their share falls with the number of layers: `--layers 32` takes twice as many.",
    "",
]


def of_depth(sizes: dict[str, Any], layers: int) -> dict[str, Any]:
    """Let a model have so many layers."""
    return sizes | {"num_hidden_layers": layers}


def spell(sizes: dict[str, Any]) -> str:
    """Name the sizes of a model."""
    return ", ".join(f"{key} {value}" for key, value in sizes.items())


def describe(layers: int) -> list[str]:
    """Configuration and versions."""
    sizes = spell(of_depth(SIZES, layers))
    return [
        "# What LoRA costs",
        "",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        f"{sizes}; float32; {ROWS} rows of {TOKENS} tokens per step over all ranks; rank {RANK} on all linear layers. "
        f"{describe_machine()}. On one process plain transformers and peft run. Written by `python -m benchmarks.lora "
        "--write`; several ranks share the cores, so times compare the two rows of a layout only.",
        "",
        "| layout | what trains | step | quartiles | peak of a rank | base | adapters or gradients and moments "
        "| activations | peak / bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


def row(name: str, trains: str, *ranks: dict[str, Any]) -> str:
    """One line of the first table."""
    ratio = f"{max(rank['ratio'] for rank in ranks):.2f}" if trains == "LoRA" else ""
    return f"| {name} | {trains} | {cells(ranks)} | {ratio} |"


def cells(ranks: Sequence[dict[str, Any]]) -> str:
    """What a step took and held: of the rank that takes longest, and of the one that holds most."""
    worst = [max(rank[key] for rank in ranks) for key in ("peak", "base", "trained", "activations")]
    times = [1e3 * second for second in max((rank["seconds"] for rank in ranks), key=median)]
    return " | ".join([f"{median(times):.0f} ms", f"{between(times)} ms", *(f"{size / MIB:.0f} MiB" for size in worst)])


def measure(directory: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Runs on each rank; bytes and seconds, with adapters and without."""
    models = [make(Path(directory), sizes, config) for config in (ON_ALL, None)]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-4) for m in models]
    ids = tokens_of_rank(sizes)
    steps = [[timed_step(*each, ids) for each in zip(models, optimizers, strict=True)] for _ in range(WARM + STEPS)]
    seconds = list(zip(*steps[WARM:], strict=True))
    return [held(*each, ids) | {"seconds": times} for *each, times in zip(models, optimizers, seconds, strict=True)]


def tokens_of_rank(sizes: dict[str, int]) -> Tensor:
    """Draw the rows of a data rank."""
    rows = ROWS // sizes.get("dp_shard", 1)
    return torch.randint(3, SIZES["vocab_size"], (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def held(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, float]:
    """Bytes at the peak of a step, and of what it has to hold."""
    parameters = [(local_tensor(p).nbytes, p.requires_grad) for p in model.parameters()]
    frozen = sum(size for size, trains in parameters if not trains)
    trained = sum(4 * size for size, trains in parameters if trains)
    activations = saved_bytes(model, ids)
    memory = Peak(model)
    moments = [local_tensor(x) for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    memory.stored |= {moment.untyped_storage()._cdata for moment in moments}
    with memory:
        step(model, optimizer, ids)
    peak = memory.peak + sum(size for size, _ in parameters) + sum(moment.nbytes for moment in moments)
    bound = frozen + trained + activations
    return {"peak": peak, "base": frozen, "trained": trained, "activations": activations, "ratio": peak / bound}


def describe_experts(layers: int) -> list[str]:
    """Head of the second table."""
    sizes = spell(of_depth(EXPERTS, layers))
    return [
        f"Adapters on stacked experts and the projections of attention. Qwen3-MoE, {sizes}; as above.",
        "",
        "| layout | step | quartiles | peak of a rank | base | adapters, gradients and moments | activations |",
        "|---|---|---|---|---|---|---|",
    ]


def measure_experts(directory: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Runs on each rank; bytes and seconds."""
    config = LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=ON_EXPERTS)
    model = make(Path(directory), sizes, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = tokens_of_rank(sizes)
    times = [timed_step(model, optimizer, ids) for _ in range(WARM + STEPS)][WARM:]
    return held(model, optimizer, ids) | {"seconds": times}


def describe_loading(size: int) -> list[str]:
    """Head of the third table."""
    return [
        f"Loading a Llama of {size / GB:.2f} GB (bfloat16, {LAYERS_TO_LOAD} layers of width 2048) with adapters, in "
        "`configure_model`: the worst rank.",
        "",
        "| layout | own memory, peak | part of base and adapters | peak / part |",
        "|---|---|---|---|",
    ]


def measure_loading(directory: str, sizes: dict[str, int]) -> tuple[int, int]:
    """Runs on each rank: the peak of own memory, and bytes of the rank's part."""
    with Memory().measured() as loading:
        model = make(Path(directory), sizes, ON_ALL)
        for parameter in model.parameters():
            local_tensor(parameter).add_(0)  # until it is written to, a tensor may be a view of the file
        dist.barrier()
    return loading.own, sum(local_tensor(p).nbytes for p in model.parameters())


def row_of_loading(name: str, ranks: list[tuple[int, int]]) -> str:
    """One line of the third table."""
    own, part = max(ranks, key=lambda rank: rank[0] / rank[1])
    return f"| {name} | {own / MIB:.0f} MiB | {part / MIB:.0f} MiB | {own / part:.2f} |"


def make(directory: Path, sizes: dict[str, int], config: LoraConfig | None) -> nn.Module:
    """Reads the model, adapts it, and makes it parallel, as a strategy does around ``configure_model``."""
    build = partial(AutoModelForCausalLM.from_pretrained, directory)
    adapt = partial(get_peft_model, peft_config=config) if config is not None else lambda base: base
    if not sizes:
        return adapt(build()).train()
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    return read_and_adapt(build, adapt, mesh, FSDP2Config()).train()


def timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """Seconds of one step, begun by all ranks together."""
    dist.barrier()
    before = time.perf_counter()
    step(model, optimizer, ids)
    return time.perf_counter() - before


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """Forward, backward, update."""
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes that autograd saves in a forward pass, each storage once, without parameters."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(local_tensor(tensor).untyped_storage().data_ptr(), local_tensor(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    known = set(_addresses(model))
    loss.backward()
    model.zero_grad()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in known)


def _addresses(model: nn.Module) -> Iterator[int]:
    for parameter in model.parameters():
        yield local_tensor(parameter).untyped_storage().data_ptr()


if __name__ == "__main__":
    from benchmarks import lora  # by its own name: ranks must be able to import what they run

    lora.main()
