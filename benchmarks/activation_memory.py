"""Saved activations per layer on tp=2, with and without sequence parallelism. Writes docs/activation_memory.md.

The bytes that autograd saves for the backward pass inside of the last layer, parameters left out and each storage
counted once; and how many of these are as large as the whole residual stream, [batch, seq, hidden].
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks._measure import describe_machine
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.structure import find_blocks
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "mixtral": {"num_local_experts": 4},
}
SIZES = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=256,
    use_cache=False,
)
MIB = 2**20


def main() -> None:
    page = Page("activation_memory.md", "activation_memory")
    parser = page.parser(__doc__)
    parser.add_argument("--length", type=int, default=1024, help="tokens")
    arguments = parser.parse_args()
    length = 32 if arguments.smoke else arguments.length
    page.add([*describe(length), ""])
    with shared_nursery() as nursery:
        page.add(rows(Pool(nursery, 2), length))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    worst = max(float(row[2].partition("(")[2].rstrip(")")) for row in tables[0].rows)
    cut = max(float(row[3].partition("(")[2].rstrip(")")) for row in tables[0].rows)
    return (
        f"saved activations of a layer on tp=2: at most {worst:.2f} of one process's, {cut:.2f} with the sequence cut"
    )


def describe(length: int) -> list[str]:
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES.items() if name not in ("use_cache", "vocab_size"))
    return [
        "# Saved activations per layer",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"1 x {length} tokens, float32, sdpa; {sizes}. {describe_machine()}. Bytes are the same in every run. Written "
        "by `python -m benchmarks.activation_memory --write`.",
        "",
        "In parentheses: against one process; 0.50 if no rank held what another holds. With sequence parallelism two",
        "streams stay whole: the inputs of attention and feed-forward, gathered for the gradients of their weights.",
    ]


def rows(pool: Pool, length: int) -> Iterator[str]:
    columns = ("one process", "tp=2", "tp=2, sequence cut")
    names = [f"{unit}, {column}" for unit in ("MiB", "streams") for column in columns]
    yield "| family | " + " | ".join(names) + " |"
    yield "|---" * 7 + "|"
    for family in FAMILIES:
        one, split, cut = pool.run(saved_bytes, family, length)[0]
        ratios = " | ".join(f"{total / MIB:.1f} ({total / one[0]:.2f})" for total, _ in (split, cut))
        streams = " | ".join(str(count) for _, count in (one, split, cut))
        yield f"| {family} | {one[0] / MIB:.1f} | {ratios} | {streams} |"


def saved_bytes(family: str, length: int) -> list[tuple[int, int]]:
    """Runs on each rank: bytes and whole streams of one process, tp=2, and tp=2 with sequence parallelism."""
    config = CONFIG_MAPPING[family](**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    ids = torch.randint(3, 256, (1, length))
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    models = [parallelize(copy.deepcopy(model), mesh, FSDP2Config(sequence_parallel=cut)) for cut in (False, True)]
    return [saved_in_last_layer(m, ids) for m in (model, *models)]


def saved_in_last_layer(model: nn.Module, ids: Tensor) -> tuple[int, int]:
    """Bytes, and number of tensors with as many elements as the whole stream."""
    *_, block = find_blocks(model).values()
    stream = ids.numel() * model.config.hidden_size
    saved: dict[int, tuple[int, bool]] = {}
    with recording(block, saved):
        model(input_ids=ids, labels=ids).loss.backward()
    return sum(size for size, _ in saved.values()), sum(elements == stream for _, elements in saved.values())


@contextmanager
def recording(block: nn.Module, saved: dict[int, tuple[int, int]]) -> Iterator[None]:
    """Within this context ``saved`` collects bytes and elements of what ``block`` saves, by storage."""
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        parameters = {p.data_ptr() for p in module_tensors(block)}
        storage = local.untyped_storage()
        if local.numel() and storage.data_ptr() not in parameters:
            kept.append(local)
            saved[storage.data_ptr()] = (storage.nbytes(), storage.nbytes() // local.element_size())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    enter = block.register_forward_pre_hook(lambda *_: hooks.__enter__())
    leave = block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters as they are at the moment: whole, local or gathered."""
    for parameter in module.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


if __name__ == "__main__":
    from benchmarks import activation_memory  # by its own name: ranks must be able to import what they run

    activation_memory.main()
