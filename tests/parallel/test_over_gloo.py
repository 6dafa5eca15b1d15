"""Gathers and reductions by messages between pairs of ranks: as gloo's own, and without a buffer."""

import inspect
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import FSDP2Config
from lightning_automodel.distributed.pairwise import all_gather, goes_over_gloo, reduce_scatter
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model
from tests.support.training import tiny_llama


def compared(dtype: torch.dtype, numel: int, is_reversed: bool) -> list[float]:
    """Runs on each rank: how far both are from gloo's, in a group of all ranks."""
    ranks = list(range(dist.get_world_size()))
    group: Any = dist.new_group(ranks[::-1], sort_ranks=False) if is_reversed else dist.group.WORLD
    assert goes_over_gloo(group)
    generator = torch.Generator().manual_seed(group.rank())
    own, terms = (torch.randn(size, generator=generator).to(dtype) for size in (numel, numel * len(ranks)))
    found, expected = (torch.empty(numel * len(ranks), dtype=dtype) for _ in range(2))
    more, no = torch.full((3,), group.rank(), dtype=torch.int64), own[:0]
    several, none = more.new_empty(3 * len(ranks)), own.new_empty(0)
    all_gather([several, found, none], [more, own, no], group)
    assert several.tolist() == [rank for rank in range(len(ranks)) for _ in range(3)]
    dist.all_gather_into_tensor(expected, own, group=group)
    inside = torch.zeros_like(found).view(len(ranks), -1)
    inside[group.rank()] = own
    all_gather([inside.view(-1)], [inside[group.rank()]], group)
    before, part, sum_of_gloo = terms.clone(), *(torch.empty(numel, dtype=dtype) for _ in range(2))
    rows = torch.arange(5 * 3, dtype=dtype).view(5, 3)  # of four ranks the third has a row, and the last none
    parts = [*rows.split(-(-5 // len(ranks))), rows[:0]]
    mean, whole = torch.empty_like(parts[min(group.rank(), len(parts) - 1)]), torch.empty_like(part)
    reduce_scatter([mean.view(-1), whole], [rows * (group.rank() + 1), terms], group, True)
    assert torch.equal(mean, parts[min(group.rank(), len(parts) - 1)] * sum(r + 1 for r in ranks) / len(ranks))
    reduce_scatter([part], [terms], group)
    assert torch.equal(terms, before)
    assert torch.equal(whole, part / len(ranks))
    dist.reduce_scatter_tensor(sum_of_gloo, terms, group=group)
    pairs = ((found, expected), (inside.view(-1), expected), (part, sum_of_gloo))
    return [float((a - b).double().norm() / b.double().norm()) for a, b in pairs]


SORTS = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of groups"
)


@pytest.mark.parametrize("is_reversed", [False, pytest.param(True, marks=SORTS)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_as_gloo_itself(dtype: torch.dtype, bar: float, is_reversed: bool, pool2: Pool, pool4: Pool) -> None:
    for pool in (pool2, pool4):
        for gathered, inside, reduced in pool.run(compared, dtype, 1001, is_reversed):
            assert gathered == inside == 0
            assert reduced <= bar


def gradients(passes: int) -> list[torch.Tensor]:
    """Runs on each rank: gradients of two forward passes before each backward pass."""
    torch.manual_seed(0)
    model: Any = parallelize(tiny_llama(), build_mesh(resolve_sizes(dist.get_world_size(), dp_shard=2), "cpu"))
    ids = torch.arange(32).view(2, 16)
    for _ in range(passes):
        both = [model(input_ids=rows, labels=rows).loss for rows in (ids, ids.flip(1))]
        sum(both).backward()
    return [p.grad.full_tensor() / passes for p in model.parameters()]


def test_each_gradient_is_added_once(pool2: Pool) -> None:
    for once, often in zip(pool2.run(gradients, 1), pool2.run(gradients, 4), strict=True):
        for a, b in zip(once, often, strict=True):
            torch.testing.assert_close(b, a)


class _Operations(TorchDispatchMode):
    """Keeps the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def operations_of_a_step(reduce_dtype: torch.dtype | None) -> set[str]:
    """Runs on each rank: names of operations, and that the gradients have what one process has."""
    torch.manual_seed(0)
    model, ids = tiny_llama(), torch.arange(32).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    sharded: Any = parallelize(model, build_mesh(resolve_sizes(2), "cpu"), FSDP2Config(mp_policy=policy))
    rows = ids[dist.get_rank()][None]
    with _Operations() as operations:
        sharded(input_ids=rows, labels=rows).loss.backward()
    for p, gradient in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), gradient)
    return operations.names


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_are_sent_from_where_they_are(reduce_dtype: torch.dtype | None, pool2: Pool) -> None:
    for names in pool2.run(operations_of_a_step, reduce_dtype):
        assert "lightning_automodel::reduce_scatter" in names
        assert not names & {"fsdp::chunk_cat", "aten::_chunk_cat", "fsdp::split_with_sizes_copy"}


def pages_of_steps(steps: int) -> list[int]:
    """Runs on each rank: how often each step asked the system for a page. Gradients of a rank have 9 MB."""
    model: Any = tiny_model("llama", hidden_size=256, intermediate_size=704)
    parallelize(model, build_mesh(resolve_sizes(2), "cpu"))
    optimizer, ids = torch.optim.SGD(model.parameters()), torch.arange(32).view(2, 16)
    found = []
    for _ in range(steps):
        before = getrusage(RUSAGE_SELF).ru_minflt
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(getrusage(RUSAGE_SELF).ru_minflt - before)
    return found


def test_freed_memory_is_kept(pool2: Pool) -> None:
    for pages in pool2.run(pages_of_steps, 6):
        assert min(pages[2:]) < 200, pages  # the system may take pages back at any moment


def pages_of_passes(passes: int) -> list[int]:
    """Runs on each rank: how often each pass asked the system for a page, of those that gather 36 MiB three times."""
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    parallelize(model, build_mesh(resolve_sizes(2), "cpu"), FSDP2Config(reshard_after_forward=True))
    ids, found = torch.arange(4).view(1, 4), []
    for _ in range(passes):
        before = getrusage(RUSAGE_SELF).ru_minflt
        with torch.no_grad():
            model(input_ids=ids)
        found.append(getrusage(RUSAGE_SELF).ru_minflt - before)
    return found


def test_what_is_gathered_comes_from_what_was_freed(pool2: Pool) -> None:
    for pages in pool2.run(pages_of_passes, 6):
        assert min(pages[2:]) < 200, pages  # 27,648 where each gather is mapped apart
