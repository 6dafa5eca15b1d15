"""One data rank: FSDP2 computes with shards where they are, and gives the numbers that it gives with copies."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.fsdp2 import shard_unit
from lightning_automodel.parallel.fsdp2.running import gradients_held
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import whole

NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IDS = [torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(i)) for i in range(2)]
GIVES_DATA, ASSIGNS, REDUCES_TWICE, KEEPS_ZEROS = 1, 2, 3, 4
"""Steps behind or in which that happens."""


@contextmanager
def watched(model: nn.Module) -> Iterator[set[bool]]:
    """Tell whether parameters of layers are in the memory of their shards while layers compute."""
    found: set[bool] = set()

    def look(layer: nn.Module, args: tuple, name: str) -> None:
        for key, parameter in layer.named_parameters(name, recurse=False):
            found.add(local(parameter).data_ptr() == local(shards[key]).data_ptr())

    shards = dict(model.named_parameters())
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: look(layer, args, name))
        for name, layer in model.named_modules()
    ]
    yield found
    for handle in handles:
        handle.remove()


def local(parameter: Any) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)


def train(tp: int, dtype: torch.dtype, in_place: bool) -> tuple[set[bool], list[dict[str, Tensor]]]:
    """Runs on each rank: five steps of two micro-batches, whose gradients wait, and what they give."""
    if not in_place:
        shard_unit.use_in_place = lambda unit: None
    mesh = build_mesh(resolve_sizes(tp, tp=tp), "cpu")
    model = parallelize(tiny_model("llama").to(dtype), mesh, FSDP2Config(), mp_policy=NARROW).train()
    optimizer, steps, places = torch.optim.SGD(model.parameters(), lr=0.1), [], set()
    for step in range(6):
        with watched(model) as found:
            for i, ids in enumerate(IDS):
                with gradients_held(model, True) if i == 0 and step != REDUCES_TWICE else nullcontext():
                    (model(input_ids=ids, labels=ids).loss / 2).backward()
        places |= found
        steps.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != KEEPS_ZEROS)
        if step == GIVES_DATA:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        if step == ASSIGNS:
            saved = {name: nn.Parameter(value.detach() * 2) for name, value in model.state_dict().items()}
            model.load_state_dict(saved, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return places, [*steps, {name: whole(value) for name, value in model.state_dict().items()}]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", with_long([torch.bfloat16, torch.float32], torch.bfloat16), ids=str)
def test_the_numbers_are_those_of_copies(dtype: torch.dtype, tp: int, nursery: Nursery) -> None:
    pool = Pool(nursery, tp)
    (places, found), (others, expected) = (pool.run(train, tp, dtype, in_place)[0] for in_place in (True, False))
    assert (places, others) == ({dtype == torch.bfloat16}, {False})  # float32 is cast
    for step, reference in zip(found, expected, strict=True):
        assert step.keys() == reference.keys()
        assert all(torch.equal(step[name], value) for name, value in reference.items())
