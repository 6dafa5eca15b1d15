"""Context parallelism against one process: loss, gradient norm and every gradient, whatever the batch and the model."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss import entropy, gather_logits, get_logprobs_from_vocab_parallel_logits
from lightning_automodel.loss.functional import count_hits
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.context import causal
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.exactness.test_sequence_parallel import ALL, WINDOWS, Case, errors, left_padded, packed, right_padded
from tests.support.comparison import Batch, Schedule
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.run_family import Run, differences
from tests.support.training import whole

BOUND = 5e-5


def uneven_labels(ids: Tensor) -> Batch:
    """All labels that count stand in the rows of one rank; in the second micro-batch, of the other."""
    labels = torch.full_like(ids, -100)
    start = 0 if ids.shape[1] == 16 else 6
    labels[:, start : start + 4] = ids[:, start : start + 4]
    return {"input_ids": ids, "labels": labels}


LENGTHS = [Case("llama", lengths=lengths) for lengths in ((2, 9), (7, 8), (23, 10), (31, 16))]
"""Too short to cut beside one that is cut; odd numbers; as long as one dimension of a head."""
MASKS = [
    *(Case("gemma3_text", batch, changes=WINDOWS) for batch in ALL),
    Case("llama", uneven_labels, (16, 24)),
]
KINDS = [
    *(Case(family, left_padded) for family in ("qwen3_moe", "deepseek_v3", "gemma3n_text", "gpt_oss")),
    *(Case(family, packed) for family in ("mistral", "doge", "inkling2_text", "glm_moe_dsa")),
    Case("nemotron_h", right_padded, changes={"num_hidden_layers": 4}),
    Case("gpt2"),
    Case("hrm_text", left_padded),
    *(Case(family, right_padded, checkpointing=True) for family in ("llama", "hy_v4", "lfm2_moe")),
]
QUICK = [LENGTHS[0], LENGTHS[3], MASKS[0], MASKS[3], MASKS[-1], KINDS[1], KINDS[4], KINDS[8], KINDS[-3]]
MESHES = [LENGTHS[0], MASKS[1], MASKS[3], KINDS[0], KINDS[3], replace(KINDS[8], checkpointing=True), KINDS[-3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "sizes"),
    with_long(
        [
            (QUICK, {"cp": 2}),
            ([*LENGTHS, *MASKS, *KINDS], {"cp": 2}),
            (MESHES, {"cp": 2, "tp": 2}),
            (MESHES, {"cp": 4}),
            (MESHES, {"dp_shard": 2, "cp": 2}),
        ],
        ([*LENGTHS, *MASKS, *KINDS], {"cp": 2}),
        (MESHES, {"cp": 2, "tp": 2}),
        (MESHES, {"cp": 4}),
        (MESHES, {"dp_shard": 2, "cp": 2}),
    ),
    ids=["cp2-quick", "cp2", "cp2-tp2", "cp4", "dp2-cp2"],
)
def test_loss_and_gradients_equal_one_process(
    cases: list[Case], sizes: dict[str, int], pool2: Pool, pool4: Pool
) -> None:
    pool = pool2 if sizes == {"cp": 2} else pool4
    for result in pool.run(errors, cases, sizes, pool.world_size, timeout=120):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}


def test_as_many_heads_as_one_rank_has_rows(pool2: Pool) -> None:
    """Blocks that give scores beside the stream: the other rank has a row more."""
    for result in pool2.run(errors, [Case("gptj", lengths=(9, 7))], {"cp": 2}, 2, timeout=60):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}


def errors_without_flash(cases: list[Case]) -> dict[str, tuple[float, str]]:
    """Runs on each rank, as on CUDA: torch's attention for each chunk, with the bias that stands for a causal mask."""
    causal.has_flash = lambda query: False
    return errors(cases, {"cp": 2}, 2)


@pytest.mark.slow
def test_kernels_that_keep_their_sums_to_themselves(pool2: Pool) -> None:
    cases = [LENGTHS[2], Case("deepseek_v3"), Case("gemma3_text"), Case("llama", checkpointing=True)]
    for result in pool2.run(errors_without_flash, cases):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}


# ---- losses ---------------------------------------------------------------------------------------------------------


def own_loss_error(family: str, config: dict[str, Any]) -> float:
    """Runs on each rank: a loss of the user's from logits, hidden states of all layers and a penalty on parameters."""
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(0))
    reference = tiny_model(family).train()
    mesh = build_mesh(resolve_sizes(2, cp=2), "cpu")
    model = parallelize(copy.deepcopy(reference), mesh, FSDP2Config(**config))
    gradients = []
    for one in (reference, model.train()):
        output = one(input_ids=ids, output_hidden_states=True, use_cache=False)
        loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + sum(state.square().mean() for state in output.hidden_states)
        loss = loss + sum(whole_with_graph(p).square().mean() for p in one.parameters())
        loss.backward()
        gradients.append({n: whole(p.grad) for n, p in one.named_parameters()})
    return max(
        float((a - e).norm() / e.norm()) for a, e in zip(gradients[1].values(), gradients[0].values(), strict=True)
    )


def whole_with_graph(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@pytest.mark.parametrize("family", with_long(["llama", "qwen3_5_text"], "qwen3_5_text"))
def test_a_loss_of_the_users_own(family: str, pool2: Pool) -> None:
    for config in ({}, {"cp_balance": False}):
        assert max(pool2.run(own_loss_error, family, config)) < BOUND


TWO = Schedule(steps=1, clip=None)
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
RUNS = {
    "mixtral": Run(sizes={"cp": 2}, schedule=Schedule(), changes=ROUTER),
    "llama": Run(sizes={"cp": 2}, schedule=Schedule(), config=FSDP2Config(chunked_loss=7, cp_balance=False)),
    "qwen3": Run(sizes={"cp": 2}, schedule=Schedule(), config=FSDP2Config(activation_checkpointing="submodule")),
}
EXCHANGED = {
    **{
        family: Run(sizes={"cp": 2}, schedule=TWO, config=FSDP2Config(cp_exchange="all_to_all"), ragged=True)
        for family in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "jamba")
    },
    "qwen2_5_vl": Run(sizes={"cp": 2}, schedule=TWO, config=FSDP2Config(cp_exchange="all_to_all", cp_balance=False)),
}
WIDE_VALUES = {
    "deepseek_v3": Run(
        sizes={"cp": 2},
        schedule=TWO,
        changes={"attention": "sdpa", "v_head_dim": 48},
        config=FSDP2Config(cp_exchange="gather"),
    )
}
EXCHANGED4 = {
    "llama": Run(sizes={"cp": 4}, schedule=TWO, config=FSDP2Config(cp_exchange="all_to_all"), ragged=True),
    "qwen3_moe": Run(
        sizes={"cp": 2, "tp": 2},
        schedule=TWO,
        config=FSDP2Config(cp_exchange="all_to_all", sequence_parallel=True, activation_checkpointing="selective"),
    ),
    "gemma3_text": Run(sizes={"cp": 4}, schedule=TWO, config=FSDP2Config(cp_exchange="auto"), ragged=True),
}
RUNS4 = {
    "gemma2": Run(
        sizes={"cp": 2, "tp": 2},
        schedule=Schedule(),
        config=FSDP2Config(sequence_parallel=True, chunked_loss=7, activation_checkpointing=True),
    ),
    "qwen3_moe": Run(sizes={"dp_replicate": 2, "cp": 2}, schedule=Schedule(), changes=ROUTER),
}


def run_errors(runs: dict[str, Run]) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each run."""
    return {family: differences(family, run).largest for family, run in runs.items()}


@pytest.mark.slow
def test_three_clipped_steps_with_levers(pool2: Pool, pool4: Pool) -> None:
    for result in (*pool2.run(run_errors, RUNS), *pool4.run(run_errors, RUNS4)):
        assert {family: error for family, error in result.items() if error[0] > BOUND} == {}


@pytest.mark.slow
def test_heads_are_exchanged(pool2: Pool) -> None:
    for result in pool2.run(run_errors, EXCHANGED):
        assert {family: error for family, error in result.items() if error[0] > BOUND} == {}


def test_values_that_are_wider_than_keys(pool2: Pool) -> None:
    for result in pool2.run(run_errors, WIDE_VALUES):
        assert {family: error for family, error in result.items() if error[0] > BOUND} == {}


@pytest.mark.long
def test_heads_are_exchanged_on_four_ranks(pool4: Pool) -> None:
    for result in pool4.run(run_errors, EXCHANGED4, timeout=120):
        assert {family: error for family, error in result.items() if error[0] > BOUND} == {}


def too_few_heads() -> None:
    mesh = build_mesh(resolve_sizes(4, cp=4), "cpu")
    model = parallelize(tiny_model("llama", num_attention_heads=6), mesh, FSDP2Config(cp_exchange="all_to_all"))
    model(input_ids=torch.zeros(1, 32, dtype=torch.int64))


def test_heads_that_do_not_divide(pool4: Pool) -> None:
    with pytest.raises(RankFailed, match="a LlamaAttention over cp, but 6 heads of a rank do not divide by cp=4"):
        pool4.run(too_few_heads)


def logits_errors(sizes: dict[str, int]) -> dict[str, float]:
    """Runs on each rank: what a user computes from the logits of a model that was called with labels."""
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(0))
    reference = tiny_model("gemma2").train()  # soft-capped
    mesh = build_mesh(resolve_sizes(2 * sizes.get("tp", 1), **sizes), "cpu")
    model = parallelize(copy.deepcopy(reference), mesh).train()
    found: list[dict[str, Any]] = []
    for one in (reference, model):
        output = one(input_ids=ids, labels=ids)
        assert output.logits.shape == (2, 13, 128)
        loss = output.loss + entropy(output.logits).mean()
        if "tp" not in sizes:
            loss = loss + functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        found.append({n: whole(p.grad) for n, p in one.named_parameters()})
        found[-1] |= {"logits": gather_logits(output.logits).detach(), "loss": loss.detach()}
        log_probs = get_logprobs_from_vocab_parallel_logits(output.logits, ids)
        found[-1] |= {"log-probabilities": log_probs.detach(), "hits": count_hits(output.logits, ids).float()}
    return {name: float((found[1][name] - e).norm() / e.norm().clamp(min=1e-6)) for name, e in found[0].items()}


@pytest.mark.parametrize("sizes", with_long([{"cp": 2}, {"cp": 2, "tp": 2}], {"cp": 2, "tp": 2}))
def test_logits_beside_a_loss(sizes: dict[str, int], pool2: Pool, pool4: Pool) -> None:
    for result in (pool4 if "tp" in sizes else pool2).run(logits_errors, sizes):
        assert {name: error for name, error in result.items() if error > BOUND} == {}
