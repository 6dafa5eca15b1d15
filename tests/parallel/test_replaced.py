"""What stands in the place of a sharded parameter without being a mistake: the forward pass takes it."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import rows, tiny_llama, whole

BOUND = 1e-4


class CallsItself(LlamaForCausalLM):
    """Its loss is that of two calls of the whole model."""

    def forward(self, input_ids: Tensor, more: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if more is None:
            return super().forward(input_ids, **kwargs)
        outputs = [self(ids, labels=ids) for ids in (input_ids, more)]
        outputs[0].loss = outputs[0].loss + outputs[1].loss
        return outputs[0]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = copy.deepcopy(tiny_llama().config)
    config.mlp_bias = True
    return CallsItself(config)


def assign(model: LlamaForCausalLM) -> None:
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(1.5 * up.weight.detach())


def drop_biases(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.bias = None


def leave(model: LlamaForCausalLM) -> None:
    """Change nothing: the model's own inner call meets what the outer one has put in place."""


def gradients(model: LlamaForCausalLM) -> dict[str, Tensor]:
    ids = rows(4)
    model(ids, more=ids.flip(1)).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def compare_both(sizes: dict[str, int], change: Callable[[LlamaForCausalLM], None]) -> None:
    """Runs on each rank; all data ranks have the same samples."""
    one = tiny()
    many = parallelize(copy.deepcopy(one), build_mesh(resolve_sizes(math.prod(sizes.values()), **sizes), "cpu"))
    change(one)
    change(many)
    expected, found = gradients(one), gradients(many)
    assert expected.keys() == found.keys()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= BOUND * max(gradient.norm(), 0.01 * norm), name


@pytest.mark.parametrize(
    ("sizes", "change"),
    [({"dp_shard": 2}, assign), ({"tp": 2}, assign), ({"tp": 2}, drop_biases), ({"dp_shard": 2, "tp": 2}, leave)],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_it_trains_as_in_one_process(sizes: dict[str, int], change: Any, nursery: Nursery) -> None:
    Pool(nursery, math.prod(sizes.values())).run(compare_both, sizes, change)
