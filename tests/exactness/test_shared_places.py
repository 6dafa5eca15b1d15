"""One module in several places of a model, as ALBERT has: a user's blocks, feed-forwards, projections and norms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans.derivation import derive_layout
from lightning_automodel.plans.selection import select_plan
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

BOUND = 1e-5


def block_twice() -> nn.Module:
    model: Any = tiny_model("llama")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers += 1
    return model


def one_feed_forward() -> nn.Module:
    model: Any = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def one_attention() -> nn.Module:
    model: Any = tiny_model("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


def gate_is_up() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj = layer.mlp.up_proj
    return model


def one_norm() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = model.model.layers[0].input_layernorm
    return model


def norm_of_blocks_and_model() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm = model.model.norm
    return model


SHARED: list[Callable[[], nn.Module]] = [block_twice, one_feed_forward, one_attention, gate_is_up, one_norm]


def errors(sizes: dict[str, int], config: FSDP2Config, makers: list[Callable[[], nn.Module]]) -> dict[str, Any]:
    """Runs on each rank."""
    world, schedule = dist.get_world_size(), Schedule(steps=2)
    return {make.__name__: compare(make, sizes, world, schedule, config).largest for make in makers}


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_what_stands_in_several_places_is_exact(sequence_parallel: bool, pool2: Pool) -> None:
    makers = SHARED if sequence_parallel else [*SHARED, norm_of_blocks_and_model]
    for found in pool2.run(errors, {"tp": 2}, FSDP2Config(sequence_parallel=sequence_parallel), makers):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def test_a_norm_that_sees_slices_in_one_place_alone_is_refused() -> None:
    model = norm_of_blocks_and_model()
    with pytest.raises(ValueError, match=r"layers\.0\.input_layernorm and model\.norm are one module"):
        derive_layout(model, select_plan(model), 2, sequence_parallel=True)


def test_a_layer_that_sees_a_part_in_one_place_alone_is_refused() -> None:
    model: Any = tiny_model("llama")
    model.model.layers[0].mlp.inside = model.model.layers[0].inside = nn.PReLU()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.inside and model\.layers\.0\.inside are one module"):
        derive_layout(model, select_plan(model), 2)
