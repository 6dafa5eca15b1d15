"""Sequence parallelism against one process: whatever the length, the mask, the positions and the way of running."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed import logs
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import apply_selective_activation_checkpointing, parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.comparison import Batch, Schedule, compare
from tests.support.families import tiny_model
from tests.support.training import whole

BOUND = 5e-5  # gemma4 with experts comes to 3e-5 on tp=4, and to 4e-14 in float64
CUT = FSDP2Config(sequence_parallel=True)
WINDOWS = {"sliding_window": 4}  # gemma3 has windows in some layers, with a rotary table of their own
WIDTH = 96
DECODER = {
    "model.language_model.decoder.layers.*.fc1": "colwise",
    "model.language_model.decoder.layers.*.fc2": "rowwise",
}


# ---- batches ---------------------------------------------------------------------------------------------------------


def text(ids: Tensor) -> Batch:
    return {"input_ids": ids, "labels": ids}


def left_padded(ids: Tensor) -> Batch:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return masked(ids, mask)


def right_padded(ids: Tensor) -> Batch:
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    return masked(ids, mask)


def masked(ids: Tensor, mask: Tensor) -> Batch:
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def positions(ids: Tensor) -> Batch:
    """Given, and not those that the model would count."""
    return text(ids) | {"position_ids": torch.arange(3, 3 + ids.shape[1]).expand_as(ids)}


def packed(ids: Tensor) -> Batch:
    """Two documents a row: positions restart, and transformers finds the borders."""
    return text(ids) | {"position_ids": restarting(ids)}


def packed_with_mask(ids: Tensor) -> Batch:
    """The same with a mask of one's own, [batch, 1, query, key], added to the scores."""
    place = restarting(ids)
    document = (place == 0).cumsum(-1)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return text(ids) | {"position_ids": place, "attention_mask": mask[:, None]}


def restarting(ids: Tensor) -> Tensor:
    first = ids.shape[1] // 3
    return torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)]).expand_as(ids)


def translation(ids: Tensor) -> Batch:
    """An encoder reads half as many tokens as a decoder writes: on tp=2, its states are as long as a slice."""
    return {"input_ids": ids[:, : ids.shape[1] // 2], "labels": ids}


ALL = (left_padded, right_padded, positions, packed, packed_with_mask)


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One comparison; micro-batches have the lengths in turn."""

    family: str
    batch: Callable[[Tensor], Batch] = text
    lengths: tuple[int, int] = (25, 16)
    changes: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, str] | None = None
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"{self.family} {self.batch.__name__} {self.lengths} {'checkpointing' * self.checkpointing}".strip()

    def build(self) -> nn.Module:
        return tiny_model(self.family, **self.changes)

    def make_parallel(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallelize(model, mesh, FSDP2Config(sequence_parallel=True, tp_plan=self.plan))
        if self.checkpointing:
            apply_selective_activation_checkpointing(model)
        return model

    def draw(self, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(10 * step + data_rank)
        ids = [torch.randint(3, 100, (schedule.rows, n), generator=generator) for n in self.lengths]
        return [self.batch(x) for x in ids]


LENGTHS = [Case("llama", lengths=lengths) for lengths in ((2, 3), (5, 4), (3, 9), (13, 8), (31, 10))]
"""Too short to cut, mixed with longer ones, and on tp=4 slices that are empty or hold one token."""
FLAT = Case("gemma4_text", right_padded, (9, 13), {"enable_moe_block": True, "top_k_experts": 2})
"""A router and experts that take [batch x slice, features]; on tp=4 also of slices that are empty or hold one token."""
MASKS = [Case("gemma3_text", batch, changes=WINDOWS) for batch in ALL]
BLOCKS = [
    *(Case(family, left_padded) for family in ("qwen3_moe", "deepseek_v3", "gemma2", "gemma3n_text")),
    Case("mistral", packed, changes=WINDOWS),
    Case("nemotron_h", right_padded, changes={"num_hidden_layers": 4}),
    replace(FLAT, checkpointing=True),
    Case("hy_v4", left_padded, checkpointing=True),  # four streams beside each other
    Case("florence2", translation, lengths=(24, 9), plan=DECODER),
    *(Case(f, right_padded, checkpointing=True) for f in ("llama", "gemma3n_text", "qwen3_moe")),
]


def errors(cases: list[Case], sizes: dict[str, int], world: int) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each case."""
    schedule = Schedule(steps=1, micro_batches=2, clip=None)
    found = {}
    for case in cases:
        differences = compare(case.build, sizes, world, schedule, make_parallel=case.make_parallel, draw=case.draw)
        found[str(case)] = differences.largest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "sizes"),
    [
        ([*LENGTHS, *MASKS, *BLOCKS], {"tp": 2}),
        pytest.param([*LENGTHS, FLAT, *MASKS], {"tp": 4}, marks=pytest.mark.long),
        ([LENGTHS[2], MASKS[1]], {"dp_shard": 2, "tp": 2}),
        pytest.param([FLAT, MASKS[3], BLOCKS[0], BLOCKS[-1]], {"dp_shard": 2, "tp": 2}, marks=pytest.mark.long),
    ],
    ids=["tp2", "tp4", "dp2-tp2", "dp2-tp2-more"],
)
def test_loss_and_gradients_equal_one_process(
    cases: list[Case], sizes: dict[str, int], pool2: Pool, pool4: Pool
) -> None:
    pool = pool2 if sizes == {"tp": 2} else pool4
    for result in pool.run(errors, cases, sizes, pool.world_size):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}


# ---- evaluation, generation ------------------------------------------------------------------------------------------


def make(family: str = "gemma3_text") -> tuple[nn.Module, nn.Module]:
    reference = tiny_model(family, **WINDOWS)
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    return reference, parallelize(copy.deepcopy(reference), mesh, CUT)


def evaluation_and_generation() -> None:
    """Token by token a sequence is too short to cut; afterwards training goes on as if nothing had been."""
    reference, model = make()
    batch = left_padded(torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0)))
    del batch["labels"]
    prompt = dict(batch, max_new_tokens=6, do_sample=False, use_cache=True)
    outcomes = []
    for one in (reference, model):
        one.eval()
        with torch.no_grad():
            logits = one(**batch).logits
        written = one.generate(**prompt)
        one.train()
        one(**text(batch["input_ids"])).loss.backward()
        outcomes.append((logits, written, {n: whole(p.grad) for n, p in one.named_parameters()}))
    (logits, written, gradients), (expected, expected_text, expected_gradients) = outcomes
    torch.testing.assert_close(logits, expected)
    assert torch.equal(written, expected_text)
    assert written.shape == (2, 15)
    torch.testing.assert_close(gradients, expected_gradients)


def test_evaluation_and_generation(pool2: Pool) -> None:
    pool2.run(evaluation_and_generation)


# ---- what is saved, what is refused ----------------------------------------------------------------------------------


def largest_saved_stream(config: FSDP2Config) -> int:
    """Runs on each rank: rows of the longest stream that layer norms save for the backward pass."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    model = parallelize(tiny_model("llama"), mesh, config)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    model(**text(torch.randint(3, 100, (2, 12))))
    return max(seen)


def test_norms_see_a_slice(pool2: Pool) -> None:
    assert pool2.run(largest_saved_stream, CUT) == [6, 6]
    assert pool2.run(largest_saved_stream, FSDP2Config()) == [12, 12]


def warnings_of_three_steps(family: str) -> list[str]:
    """Runs on each rank."""
    logs._seen.clear()
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize(tiny_model(family), mesh, CUT)
        for _ in range(3):
            model(**text(torch.randint(3, 100, (2, 12))))
    return [str(w.message) for w in caught if "sequence_parallel=True has no effect" in str(w.message)]


@pytest.mark.slow
def test_a_stream_that_stays_whole_is_named_once(pool2: Pool) -> None:
    (message,), others = pool2.run(warnings_of_three_steps, "gemma3n_text")
    assert "no effect on model.layers.0 and the blocks behind it" in message
    assert not others
    for family in ("llama", "hy_v4"):
        assert pool2.run(warnings_of_three_steps, family) == [[], []]


class Reentrant(nn.Module):
    """Runs a block again in the backward pass, with a copy of its input that knows nothing of the sequence."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return checkpoint(partial(self.block, **kwargs), hidden, use_reentrant=True)


def reentrant_checkpointing() -> None:
    _, model = make("llama")
    model.model.layers[1] = Reentrant(model.model.layers[1])
    model.train()(**text(torch.randint(3, 100, (2, 12)))).loss.backward()


def argument_that_looks_like_a_slice() -> None:
    """It enters the second block only, when the stream is cut already."""
    _, model = make("llama")

    def add(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"memory": torch.zeros(2, 6, WIDTH)}

    model.model.layers[1].register_forward_pre_hook(add, prepend=True, with_kwargs=True)
    model(**text(torch.randint(3, 100, (2, 12))))


def output_of_another_length() -> None:
    _, model = make("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output[:, :5], prepend=True)
    model(**text(torch.randint(3, 100, (2, 12))))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (output_of_another_length, r"cannot cut the output of model.layers.1.mlp \(\(2, 5, 96\)\) on a sequence of 12"),
        (reentrant_checkpointing, "with sequence_parallel=True needs use_reentrant=False"),
        (argument_that_looks_like_a_slice, "cannot tell memory, .* from a slice of the 12 tokens"),
    ],
)
def test_what_is_refused(check: Callable[[], None], message: str, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=message):
        pool2.run(check)
