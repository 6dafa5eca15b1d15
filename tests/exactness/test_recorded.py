"""What models record of their layers under tp: attention maps and router logits of one process, each of them once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE
from tests.support.comparison import compare
from tests.support.families import tiny_model

MAPS = ("llama", "opt", "gptj", "openai-gpt", "rembert", "xlm", "mvp")
"""Recorded by transformers; of blocks that are tried; collected by models of what layers return, in several depths."""


def maps_of(model: nn.Module) -> list[Tensor]:
    return list(model.eval()(input_ids=torch.arange(3, 15).view(2, 6), output_attentions=True).attentions)


def errors_of_maps(names: tuple[str, ...], sequence_parallel: bool) -> dict[str, float]:
    """Runs on each rank: how far the maps of the first pass are from those of one process."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    for name in names:
        config = FSDP2Config(sequence_parallel=sequence_parallel)
        ours = maps_of(parallelize(tiny_model(name, "eager"), mesh, config))
        expected = maps_of(tiny_model(name, "eager"))
        assert [x.shape for x in ours] == [x.shape for x in expected], name
        found[name] = max(float((x - y).norm() / y.norm()) for x, y in zip(ours, expected, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_maps(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors_of_maps, MAPS, sequence_parallel, timeout=120):
        assert max(found.values()) < BOUND, found


def routed(ran: bool) -> nn.Module:
    """A model that balances its experts, and that a user has run before it is split."""
    model: Any = tiny_model("mixtral")
    model.config.output_router_logits = True
    if ran:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 12)[None])
    return model


def errors_of_routes(ran: bool) -> float:
    """Runs on each rank."""
    return compare(partial(routed, ran), {"tp": 2}, 2, SCHEDULE).largest[0]


@pytest.mark.parametrize("ran", [False, True])
def test_losses_of_routers(ran: bool, pool2: Pool) -> None:
    assert max(pool2.run(errors_of_routes, ran)) < BOUND
