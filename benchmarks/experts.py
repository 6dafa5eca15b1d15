"""What moves for a layer of experts, what a rank holds, and what a step takes: experts that are gathered, split or left
where they are. Writes docs/experts_traffic.md.

Bytes are counted while a step runs on four ranks: what a rank receives, of one more layer of the same model, so that
all that is not a layer cancels. Memory is the peak of one step. Both are the same in every step. Times are medians of
alternating steps, with quartiles.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks._measure import between, describe_machine
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import DP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.planner.watch import FORWARD, GRADIENTS, PARAMETERS, Watch
from lightning_automodel.testing.pool import Nursery, Pool

RANKS = 4
MIB = 2**20
EXPERTS, HIDDEN, INNER, CHOSEN = 32, 256, 128, 4
TOKENS, BATCHED = (512, 1024), 512  # with more, batched_mm copies gigabytes
BYTES = 4  # float32
KERNELS = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True)
class Way:
    """One way to bring tokens and experts together."""

    sizes: dict[str, int]
    whole: bool = False

    def config(self, model: nn.Module) -> FSDP2Config:
        """Make the switches, with the model's own plan of whole experts where it is asked for."""
        plan: Any = {"extends": "model", **model.ep_plan} if self.whole else None  # type: ignore[dict-item]
        return FSDP2Config(tp_plan=plan)


WAYS = {
    "gathered (dp_shard=4)": Way({"dp_shard": 4}),
    "ep=2 (dp_shard=4)": Way({"dp_shard": 4, "ep": 2}),
    "ep=4 (dp_shard=4)": Way({"dp_shard": 4, "ep": 4}),
    "split inside (dp_shard=2 x tp=2)": Way({"dp_shard": 2, "tp": 2}),
    "whole over tp (dp_shard=2 x tp=2)": Way({"dp_shard": 2, "tp": 2}, whole=True),
}


def main() -> None:
    """Entry point of ``python -m benchmarks.experts``."""
    page = Page("experts_traffic.md", "experts")
    parser = page.parser(__doc__, rounds=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of each data rank")
    arguments = parser.parse_args()
    with shared_nursery() as nursery:
        tokens, rounds = ((64,), 1) if arguments.smoke else (arguments.tokens, arguments.rounds)
        page.add(report(nursery, tokens, rounds))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    first, name = tables[0], "ep=4 (dp_shard=4)"
    moved = first.number(name, "received, MiB") / first.number("gathered", "received, MiB")
    seconds = first.number(name, "ratio")
    return f"ep=4 receives {moved:.2f} of what gathered experts do, and takes {seconds:.2f} of the time"


def report(nursery: Nursery, tokens: Any, rounds: int) -> Iterator[str]:
    """The page, line by line."""
    yield "# What moves for a layer of experts"
    yield ""
    yield (
        f"{describe_machine()}. Qwen3-MoE with {EXPERTS} experts of {HIDDEN} x {INNER}, {CHOSEN} per token, float32. "
        "MiB that a rank receives for one layer in a step, the most memory that a step of two layers holds on it, and "
        "the median of its times with their quartiles, as a ratio to experts that are gathered. Ways alternate; bytes "
        "are the same in every step. With tp=2 two ranks see the same tokens, so the step has half as many. Written by "
        "`python -m benchmarks.experts --write`; `--tokens 2048 8192` takes more tokens."
    )
    for count in tokens:
        yield from ("", f"## {count} tokens on each data rank", "")
        columns = "received, MiB | of it all-to-all | formula, MiB | held, MiB | ms per step | quartiles | ratio"
        yield f"| experts are | {columns} |"
        yield "|---|---|---|---|---|---|---|---|"
        found = Pool(nursery, RANKS).run(measure, count, rounds, timeout=900)[0]
        base = median(found["gathered (dp_shard=4)"]["ms"])
        for name, row in found.items():
            expected = f"{formula(WAYS[name], count) / MIB:.1f}"
            yield (
                f"| {name} | {row['received'] / MIB:.1f} | {row['exchanged'] / MIB:.1f} | {expected} | "
                f"{row['held'] / MIB:.1f} | {median(row['ms']):.0f} | {between(row['ms'])} | "
                f"{median(row['ms']) / base:.2f} |"
            )
    yield from ("", "## Kernels of experts", "")
    yield (
        f"`experts_implementation`: milliseconds of forward and backward pass of one layer's {EXPERTS} experts on one "
        f"process, by the number of tokens (batched_mm: up to {BATCHED}); medians, quartiles and the ratio to eager."
    )
    yield from ("", f"| | {' | '.join(f'{count} tokens' for count in tokens)} |", "|---" * (len(tokens) + 1) + "|")
    times = Pool(nursery, 1).run(kernels, tokens, rounds, timeout=900)[0]
    for name in KERNELS:
        yield f"| {name} | {' | '.join(kernel_cell(times, name, count) for count in tokens)} |"
    yield ""
    even = 3 * 3 * EXPERTS * INNER / (4 * CHOSEN)
    yield (
        "The formula counts experts only, with N data ranks: gathered, 2 gathers and a reduce-scatter of 3 E H I "
        "numbers, times (N - 1) / N; with ep, 4 exchanges of T k H numbers, times (ep - 1) / ep, and what is gathered "
        f"over N / ep ranks of 1 / ep of the experts. ep=N moves less below T = 9 E I / (4 k) tokens per rank, here "
        f"{even:.0f}; in bfloat16 with gradients reduced in float32, below 3 E I / k. Where tp splits or divides the "
        "experts, no token travels, and the boundary sums H numbers of each token twice."
    )


def kernel_cell(times: Mapping[tuple[str, int], list[float]], name: str, tokens: int) -> str:
    """Median, quartiles and the ratio to eager."""
    found = times.get((name, tokens))
    return (
        f"{median(found):.0f} ({between(found)}), {median(found) / median(times['eager', tokens]):.2f}" if found else ""
    )


def formula(way: Way, tokens: int) -> float:
    """Bytes that a rank receives for the experts of a layer in a step."""
    shards, ep, tp = way.sizes["dp_shard"], way.sizes.get("ep", 1), way.sizes.get("tp", 1)
    efsdp, numbers = shards // ep, 3 * EXPERTS * HIDDEN * INNER / (ep * tp)
    gathered = 3 * numbers * (efsdp - 1) / efsdp
    travelling = 4 * tokens * CHOSEN * HIDDEN * (ep - 1) / ep
    return BYTES * (gathered + travelling)


# ---- on a rank -------------------------------------------------------------------------------------------------------


def measure(tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Runs on each rank: bytes, memory and milliseconds of every way."""
    found: dict[str, dict[str, Any]] = {}
    models = {}
    for name, way in WAYS.items():
        two, three = (_build(way, layers) for layers in (2, 3))
        few, many = (_watched(model, tokens) for model in (two, three))
        found[name] = {key: many[key] - few[key] for key in ("received", "exchanged")} | {"held": few["held"]}
        models[name] = two
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(_seconds(model, tokens))
    return {name: row | {"ms": [1000 * seconds for seconds in times[name]]} for name, row in found.items()}


def _build(way: Way, layers: int) -> nn.Module:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(_config(layers))
    mesh = build_mesh(resolve_sizes(RANKS, **way.sizes), "cpu")
    parallelize(model, mesh, way.config(model))
    model.data_rank = axis(mesh, DP).get_local_rank()
    return model.train()


def _config(layers: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=max(TOKENS),
        use_cache=False,
    )


def _step(model: nn.Module, tokens: int, watch: Watch | None = None) -> None:
    generator = torch.Generator().manual_seed(int(model.data_rank))  # type: ignore[arg-type]
    ids = torch.randint(512, (1, tokens), generator=generator)
    loss = model(input_ids=ids, labels=ids).loss
    if watch is not None:
        watch.end_forward(model.parameters())
    loss.backward()


def _watched(model: nn.Module, tokens: int) -> dict[str, float]:
    _step(model, tokens)  # FSDP2 finds its order in the first step
    model.zero_grad()
    groups = {ranks: str(len(ranks)) for ranks in _groups()}
    with Watch("cpu", groups) as watch:
        watch.hold(model.parameters(), PARAMETERS)
        watch.enter(FORWARD)
        _step(model, tokens, watch)
        watch.hold((p.grad for p in model.parameters()), GRADIENTS)
    result = watch.finish()
    received = exchanged = 0.0
    for collective, volume in result.volume.items():
        ranks = int(collective.axis.split()[0])
        times = {"all_reduce": 2.0}.get(collective.kind, 1.0)
        received += times * volume * (ranks - 1) / ranks
        exchanged += volume * (ranks - 1) / ranks if collective.kind == "all_to_all" else 0.0
    model.zero_grad()
    held = max(peak.total() for peak in result.peaks.values())
    return {"received": received, "exchanged": exchanged, "held": float(held)}


def kernels(tokens: Sequence[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Runs on one rank: milliseconds of one layer of experts, by kernel and number of tokens."""
    times: dict[tuple[str, int], list[float]] = {}
    for count in tokens:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(count, HIDDEN, generator=generator)
        index = torch.rand(count, EXPERTS, generator=generator).topk(CHOSEN).indices
        weights = torch.rand(count, CHOSEN, generator=generator)
        for i in range(rounds + 1):
            for name in KERNELS if count <= BATCHED else KERNELS[:-1]:
                experts = _experts(name)
                start = time.perf_counter()
                experts(hidden.requires_grad_(), index, weights).square().mean().backward()
                if i > 0:
                    times.setdefault((name, count), []).append(1000 * (time.perf_counter() - start))
    return times


def _experts(implementation: str) -> nn.Module:
    config = _config(1)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = Qwen3MoeForCausalLM(config).get_submodule("model.layers.0.mlp.experts")
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    return experts


def _groups() -> list[tuple[int, ...]]:
    world = range(dist.get_world_size())
    return [tuple(world)]


def _seconds(model: nn.Module, tokens: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    _step(model, tokens)
    dist.barrier()
    model.zero_grad()
    return time.perf_counter() - start


if __name__ == "__main__":
    from benchmarks import experts  # ranks find functions by the name of their module

    experts.main()
