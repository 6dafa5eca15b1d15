"""What FSDP2 gathered ahead of passes that never came is not computed with once the weights are others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.parallel.test_in_place import NARROW
from tests.support.training import HIDDEN, rows, tiny_llama

IDS = rows(2)


def call_alone(model: Any, layer: int) -> Tensor:
    """Call a layer by itself; the one behind it is gathered ahead."""
    states = torch.ones(1, 4, HIDDEN, dtype=model.dtype)
    positions = model.model.rotary_emb(states, torch.arange(4)[None])
    with torch.no_grad():
        return model.model.layers[layer](states, position_embeddings=positions)


def change(model: nn.Module, how: str) -> None:
    """Change all weights."""
    if how == "step":
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    elif how == "load":
        model.load_state_dict({name: value.detach() * 0.5 for name, value in model.state_dict().items()})
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def passes(ranks: int, how: str, layer: int | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Runs on each rank, or as one process where ``ranks`` is 0."""
    model = tiny_llama(tied=False).to(dtype)
    if ranks:
        policy = {} if dtype == torch.float32 else {"mp_policy": NARROW}
        model = parallelize(model, build_mesh(resolve_sizes(ranks), "cpu"), FSDP2Config(), **policy)
    model(input_ids=IDS, labels=IDS).loss.backward()
    call_alone(model, 0)
    change(model, how)
    if layer is not None:
        return [call_alone(model, layer)]
    return [model(input_ids=IDS, labels=IDS).loss.detach()]


@pytest.mark.parametrize("how", ["step", "load", "data"])
def test_a_model_computes_with_what_weights_are_now(how: str, pool2: Pool) -> None:
    for found in pool2.run(passes, 2, how, None):
        torch.testing.assert_close(found, passes(0, how, None), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("how", ["step", "load", "data"])
def test_shards_in_place(how: str, layer: int | None, nursery: Nursery) -> None:
    (found,) = Pool(nursery, 1).run(passes, 1, how, layer, torch.bfloat16)
    torch.testing.assert_close(found, passes(0, how, layer, torch.bfloat16), rtol=1e-6, atol=0)
