"""Code that is not transformers': where tokens meet is read off it, and what is not known sees the whole sequence."""

from functools import partial

import pytest
import torch.distributed as dist
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans.tokenwise import keeps_tokens_apart
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.own_code import MLP, Attention, Block, BlockThatAttends, Shift, own_model

BOUND = 5e-5
PLAN = {"body.layers.*.mlp.up": "colwise", "body.layers.*.mlp.down": "rowwise"}
MODELS: list[tuple[type[nn.Module], bool]] = [(Block, False), (Block, True), (BlockThatAttends, False)]


def errors(sizes: dict[str, int], config: FSDP2Config) -> list[tuple[float, str]]:
    """Runs on each rank."""
    schedule = Schedule(steps=2, micro_batches=2, clip=0.5)
    return [
        compare(partial(own_model, *model), sizes, dist.get_world_size(), schedule, config).largest for model in MODELS
    ]


def test_what_is_read_off_the_source() -> None:
    assert keeps_tokens_apart(Block())
    assert keeps_tokens_apart(MLP())
    assert not keeps_tokens_apart(BlockThatAttends())
    assert not keeps_tokens_apart(Attention())
    assert not keeps_tokens_apart(Shift())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"cp": 2}, FSDP2Config()),
        ({"tp": 2}, FSDP2Config(tp_plan=PLAN, sequence_parallel=True)),
    ],
    ids=["cp", "tp-sp"],
)
def test_code_of_users(sizes: dict[str, int], config: FSDP2Config, pool2: Pool) -> None:
    for found in pool2.run(errors, sizes, config):
        assert [error for error in found if error[0] > BOUND] == []


@pytest.mark.long
def test_code_of_users_on_both_axes(pool4: Pool) -> None:
    config = FSDP2Config(tp_plan=PLAN, sequence_parallel=True)
    for found in pool4.run(errors, {"cp": 2, "tp": 2}, config):
        assert [error for error in found if error[0] > BOUND] == []
