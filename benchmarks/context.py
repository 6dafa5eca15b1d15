"""What context parallelism saves and moves: bytes kept for the backward pass, bytes received, time.

Writes docs/context_memory.md.

Kept bytes are those that autograd saves in one forward pass with a loss, parameters left out and each storage counted
once, of the rank that keeps most; tensors are fake, so that 65536 tokens need no memory. Packed documents need masks,
which are real, so their sequences are shorter.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from benchmarks._measure import between, describe_machine
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed import head_exchange, sequence_rows
from lightning_automodel.loss import vocab_parallel
from lightning_automodel.loss.install import install_loss
from lightning_automodel.loss.row_logits import RowLogits
from lightning_automodel.mesh import TP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallel.context import ContextParallel, state
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.context import derive_context_layout
from lightning_automodel.testing.pool import Nursery, Pool

SIZES: dict[str, Any] = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=2**20,
    use_cache=False,
)
LENGTHS, MASKED, TIMED = (4096, 16384, 65536), (2048, 4096), 1024
LAYOUTS = [(1, "gather"), (2, "gather"), (2, "all_to_all"), (4, "gather"), (4, "all_to_all")]
MIB, GIB = 2**20, 2**30


def main() -> None:
    page = Page("context_memory.md", "context")
    parser = page.parser(__doc__, rounds=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of sequences without masks")
    parser.add_argument("--packed", type=int, nargs="+", default=MASKED, help="tokens of sequences of four documents")
    arguments = parser.parse_args()
    lengths, masked = ((256,), (128,)) if arguments.smoke else (arguments.lengths, arguments.packed)
    timed, rounds = (128, 1) if arguments.smoke else (TIMED, arguments.rounds)
    with shared_nursery() as nursery:
        page.add(report(nursery, lengths, masked))
        page.add(times(nursery, timed, rounds))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    kept = tables[0].columns.index("cp=2 gather")
    row = next(row for row in reversed(tables[0].rows) if "packed" not in row[0])
    return f"of {row[0]} tokens, a rank of cp=2 keeps {row[kept].split()[0]} MiB for {row[1]} MiB on one process"


def report(nursery: Nursery, lengths: Sequence[int], masked: Sequence[int]) -> Iterator[str]:
    """The page, line by line."""
    yield "# What context parallelism saves"
    yield ""
    yield (
        f"Llama of {SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, 8 heads with 2 key/value heads, "
        f"vocabulary {SIZES['vocab_size']}, float32. {describe_machine()}. MiB that one rank keeps for the backward "
        "pass of one sequence with a loss (in brackets: times a share of 1/cp), and MiB that it receives in both "
        "passes; both are the same in every run. Packed: four documents. Written by `python -m benchmarks.context "
        "--write`."
    )
    yield ""
    pool = Pool(nursery, 1)
    titles = ["cp=1", *(f"cp={cp} {exchange}" for cp, exchange in LAYOUTS[1:])]
    yield f"| sequence | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 1) + "|"
    per_token: dict[int, float] = {}
    for length in lengths:
        found = [pool.run(_fake, length, cp, exchange, timeout=300)[0] for cp, exchange in LAYOUTS]
        yield f"| {length} | {' | '.join(_cells(found))} |"
        pairs = zip(LAYOUTS, found, strict=True)
        per_token = {cp: kept / length for (cp, exchange), (kept, _) in pairs if exchange == "gather"}
    for length in masked:
        found = [max(Pool(nursery, cp).run(_packed, length, cp, exchange, timeout=300)) for cp, exchange in LAYOUTS]
        yield f"| {length} packed | {' | '.join(_cells(found))} |"
    yield ""
    longest = ", ".join(f"{int(8 * GIB / size)} with cp={cp}" for cp, size in per_token.items())
    yield f"Tokens of the longest sequence whose kept bytes fit in 8 GiB (as they grow at {lengths[-1]}): {longest}."


def times(nursery: Nursery, length: int, rounds: int) -> Iterator[str]:
    """What a step takes two ranks, in a sentence."""
    ranks = Pool(nursery, 2).run(_time, length, rounds, timeout=300)
    seconds = {cp: max((rank[cp] for rank in ranks), key=median) for cp in (1, 2)}
    found = {cp: f"{median(taken):.2f} ({between(taken, 2)})" for cp, taken in seconds.items()}
    yield ""
    yield (
        f"Seconds of a forward and backward pass of one sequence of {length} tokens on two ranks of one machine, with "
        f"quartiles: {found[1]} where each computes all of it (dp_shard=2), {found[2]} with cp=2; medians of {rounds} "
        "that alternate."
    )


def _cells(found: list[tuple[int, int]]) -> Iterator[str]:
    whole = found[0][0]
    for (cp, _), (kept, moved) in zip(LAYOUTS, found, strict=True):
        share = f" ({kept * cp / whole:.2f})" if cp > 1 else ""
        yield f"{kept / MIB:.0f}{share}{f', moves {moved / MIB:.0f}' if cp > 1 else ''}"


# ---- on a rank -------------------------------------------------------------------------------------------------------


def _fake(length: int, cp: int, exchange: str) -> tuple[int, int]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
    mesh = build_mesh(resolve_sizes(cp, cp=cp), "cpu")
    no_packing = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    no_check = mock.patch.object(vocab_parallel, "check_targets", return_value=None)
    no_logits = mock.patch.object(RowLogits, "of_rows", lambda own, *_: own)
    no_draws = mock.patch.object(state, "drawing_aside", return_value=nullcontext())  # no values, no seeds
    with FakeTensorMode(), no_packing, no_check, no_logits, no_draws:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")).train()
        install_loss(model, axis(mesh, TP), FSDP2Config())
        if cp > 1:
            context = ContextParallel(model, axis(mesh, "cp").get_group(), derive_context_layout(model), True, exchange)
            context.install_outside()
            context.install_inside()
        ids = torch.zeros(1, length, dtype=torch.int64)
        return _measure(model, {"input_ids": ids, "labels": ids})


def _packed(length: int, cp: int, exchange: str) -> tuple[int, int]:
    """Documents of a quarter of the sequence."""
    mesh = build_mesh(resolve_sizes(cp, cp=cp), "cpu")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    model = parallelize(model, mesh, FSDP2Config(cp_exchange=exchange)).train()
    ids = torch.zeros(1, length, dtype=torch.int64)
    positions = torch.arange(length // 4).repeat(4)[None]
    return _measure(model, {"input_ids": ids, "labels": ids, "position_ids": positions})


def _measure(model: nn.Module, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes kept after the forward pass, and bytes received in both."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters() if not isinstance(parameter, DTensor)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and not isinstance(tensor, nn.Parameter):
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with _counting() as moved:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(**batch).loss
        loss.backward()
    return sum(kept.values()), sum(moved)


@contextmanager
def _counting() -> Iterator[list[int]]:
    """What the collectives of context parallelism receive, in bytes."""
    moved: list[int] = []

    def counted(stock: Any, received: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is not None:
                moved.append(received(args, kwargs["group"].size()))
            return stock(*args, **kwargs)

        return call

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    gather = counted(dist.all_gather, lambda args, ranks: size(args[1]) * (ranks - 1))
    reduce = counted(sequence_rows.reduce_scatter, lambda args, ranks: size(args[0]) * (ranks - 1))
    exchange = counted(dist.all_to_all_single, lambda args, ranks: size(args[0]) * (ranks - 1) // ranks)
    with (
        mock.patch.object(sequence_rows.dist, "all_gather", gather),
        mock.patch.object(sequence_rows, "reduce_scatter", reduce),
        mock.patch.object(head_exchange.dist, "all_to_all_single", exchange),
    ):
        yield moved


def _time(length: int, rounds: int) -> dict[int, list[float]]:
    models = {}
    for cp in (1, 2):
        torch.manual_seed(0)
        mesh = build_mesh(resolve_sizes(2, cp=cp), "cpu")
        models[cp] = parallelize(LlamaForCausalLM(LlamaConfig(**SIZES)).train(), mesh, FSDP2Config()).train()
    ids = torch.randint(3, 1000, (1, length))
    seconds: dict[int, list[float]] = {cp: [] for cp in models}
    for _ in range(1 + rounds):
        for cp, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            seconds[cp].append(time.perf_counter() - start)
    return {cp: taken[1:] for cp, taken in seconds.items()}


if __name__ == "__main__":
    from benchmarks import context  # ranks find functions by the name of their module

    context.main()
