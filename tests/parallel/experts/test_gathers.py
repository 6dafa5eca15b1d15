"""How often experts are gathered and tokens travel in a step, counted on a rank that is played."""

from typing import Any

import pytest

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import EFSDP, EP, resolve_sizes
from lightning_automodel.planner.plan import build
from lightning_automodel.planner.play import Run, play, stage
from tests.support.families import tiny_config

LAYERS = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "switches", "gathered_again", "there_and_back"),
    [
        ("qwen3_moe", {}, LAYERS - 1, 2),  # the backward pass begins with the last block, which is whole still
        ("qwen3_moe", {"reshard_after_forward": True}, LAYERS, 2),
        # beside an expert of all tokens
        pytest.param("qwen3_next", {"activation_checkpointing": True}, LAYERS - 1, 4, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"activation_checkpointing": True}, LAYERS - 1, 4, marks=pytest.mark.long),
        pytest.param("qwen3_moe", {"activation_checkpointing": "selective"}, LAYERS - 1, 4, marks=pytest.mark.long),
    ],
)
def test_calls_of_a_step(family: str, switches: dict[str, Any], gathered_again: int, there_and_back: int) -> None:
    sizes, config = resolve_sizes(8, ep=2), FSDP2Config(**switches)
    run = Run(sizes=sizes, config=config, sequence_length=32, device_type="cpu")
    model = build(tiny_config(family, num_hidden_layers=LAYERS, num_experts=8))
    with stage(run) as mesh:
        counts = play(model, run, mesh).counts
    calls = {(key.kind, key.axis, key.phase): number for key, number in counts.items() if key.axis in (EFSDP, EP)}
    numbers = LAYERS * (there_and_back > 2)  # how many rows come is asked again where routes are computed again
    assert calls == {
        ("all_gather", EFSDP, "forward"): LAYERS,
        ("all_gather", EFSDP, "backward"): gathered_again,
        ("reduce_scatter", EFSDP, "backward"): LAYERS,
        ("all_to_all", EP, "forward"): 3 * LAYERS,
        ("all_to_all", EP, "backward"): there_and_back * LAYERS + numbers,
    }
