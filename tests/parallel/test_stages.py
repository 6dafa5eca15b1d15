"""One sequence of stages for all strategies: what each says on rank 0, in order."""

import logging
import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel import DDPConfig, FSDP2Config, MegatronFSDPConfig
from lightning_automodel.mesh import DP, DP_REPLICATE, TP, Axes, axis, build_mesh, resolve_sizes
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallel.megatron_fsdp.building import split_over_tp
from lightning_automodel.parallel.replication import Replication
from lightning_automodel.parallel.stages import apply_stages
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.plans.support import build_llama

SHARED: dict[str, Any] = {"activation_checkpointing": True, "enable_compile": True, "chunked_loss": 8}
IN_BLOCKS = (
    r"the loss is computed in chunks of 8 \(torch\) of logits over 131 classes",
    r"3 blocks recompute activations \(True\)",
    r"3 blocks are compiled \(inductor, dynamic=None\)",
)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def heard(strategy: str) -> list[str]:
    """Runs on each rank."""
    handler, logger = Heard(), logging.getLogger("lightning_automodel")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        STRATEGIES[strategy]()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return handler.messages


def with_fsdp2() -> None:
    config = FSDP2Config(**SHARED, sequence_parallel=True, autocast_dtype="bfloat16")
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    parallelize(build_llama(), mesh, config, mp_policy=policy, param_dtype=torch.bfloat16)


def with_ddp() -> None:
    mesh = build_mesh(resolve_sizes(2, dp_shard=1, dp_replicate=2), "cpu")
    axes = Axes(tp=axis(mesh, TP), data=axis(mesh, DP_REPLICATE))
    stage = Replication(axes, torch.device("cpu"), torch.bfloat16)
    apply_stages(build_llama(), axes, DDPConfig(**SHARED), stage)


def with_megatron() -> None:
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    split_over_tp(build_llama(), Axes(tp=axis(mesh, TP), data=axis(mesh, DP)), MegatronFSDPConfig(**SHARED))


STRATEGIES = {"FSDP2": with_fsdp2, "DDP": with_ddp, "Megatron-FSDP": with_megatron}
PLAN, SPLIT = "tensor parallelism by", r"tp=2 splits \d+ of \d+ parameters, with 6 boundaries"
EXPECTED = {
    "FSDP2": (
        PLAN,
        "parameters are stored in torch.bfloat16",
        f"{SPLIT}, the stream cut on 3 blocks",
        *IN_BLOCKS,
        "the forward pass runs under autocast to torch.bfloat16",
        "FSDP2 shards 3 units and the rest over",
    ),
    "DDP": (*IN_BLOCKS, "a replica on each of 2 ranks, compute in torch.bfloat16"),
    "Megatron-FSDP": (PLAN, SPLIT, *IN_BLOCKS),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stages_say_what_they_did(strategy: str, pool2: Pool) -> None:
    first, second = pool2.run(heard, strategy)
    said = iter(first)
    for expected in EXPECTED[strategy]:
        assert any(re.search(expected, message) for message in said), f"{expected!r} is not said after the one before"
    assert second == []


def test_layers_beside_models_have_no_blocks_and_no_loss() -> None:
    head, config = torch.nn.Linear(4, 4), FSDP2Config(**SHARED, autocast_dtype="bfloat16")
    for tp, plan in ((1, None), (2, {"weight": "replicate", "bias": "replicate"})):
        assert config_for(head, config, tp) == FSDP2Config(autocast_dtype="bfloat16", tp_plan=plan)
    assert config_for(head, DDPConfig(**SHARED, compile_backend="eager"), 1) == DDPConfig()
    assert config_for(build_llama(), config, 2) is config
