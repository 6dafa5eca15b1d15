"""Models called with labels, against one process: soft-capped, scaled, tied and untied, with an auxiliary loss."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Batch, Schedule, batches, compare
from tests.support.families import tiny_model

BOUND = 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 131, "tie_word_embeddings": True},
    "qwen3": {"vocab_size": 131, "tie_word_embeddings": False},
    "gemma2": {"final_logit_softcapping": 0.3},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "vocab_size": 131},
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "inkling2_text": {"unpadded_vocab_size": 101},
    "bart": {},  # its own cross entropy
    "xlm": {},  # that of a layer around the head
    "t5gemma2": {},  # an encoder and a decoder: labels are not shifted against the logits
}
CHUNKED = {"chunked_loss": 7}
CUT = {"sequence_parallel": True}


def draw(counted: bool, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Text of which a third does not count; the sum of losses over a number of tokens, or the mean."""
    generator = torch.Generator().manual_seed(step)
    found = batches(schedule, step, data_rank, vocabulary=100)
    for batch in found:
        ignored = torch.rand(batch["labels"].shape, generator=generator) < 0.3
        batch["labels"] = batch["labels"].masked_fill(ignored, -100)
        if counted:
            batch["num_items_in_batch"] = torch.tensor(40)
    return found


def errors(
    families: list[str], sizes: dict[str, int], world: int, configs: list[dict[str, Any]]
) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each model under each config."""
    found = {}
    for family in families:
        for i, config in enumerate(configs):
            differences = compare(
                partial(tiny_model, family, **MODELS[family]),
                sizes,
                world,
                Schedule(steps=1, length=19),
                FSDP2Config(**config),
                draw=partial(draw, i % 2 == 1),
            )
            found[f"{family} {config}"] = differences.largest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("families", "sizes", "configs"),
    [
        (list(MODELS), {"tp": 2}, [{}, CUT | CHUNKED]),
        (["llama", "gemma2", "inkling2_text"], {"dp_shard": 2}, [{}, CHUNKED]),
        pytest.param(["llama", "gemma2", "mixtral"], {"dp_shard": 2, "tp": 2}, [CUT, CHUNKED], marks=pytest.mark.long),
    ],
    ids=["tp", "dp", "dp-tp"],
)
def test_loss_and_gradients_equal_one_process(
    families: list[str], sizes: dict[str, int], configs: list[dict[str, Any]], pool2: Pool, pool4: Pool
) -> None:
    pool = pool4 if len(sizes) == 2 else pool2
    for result in pool.run(errors, families, sizes, pool.world_size, configs):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}
