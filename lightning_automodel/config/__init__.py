"""The switches of the strategies, as frozen dataclasses that YAML and the command line reach. Sizes are not here."""

from lightning_automodel.config.ddp import DDPConfig
from lightning_automodel.config.fsdp2 import FSDP2Config
from lightning_automodel.config.megatron import MegatronFSDPConfig
from lightning_automodel.config.switches import LEVERS_OF_BLOCKS, SWITCHES_OF_LOSS, StageSwitches
from lightning_automodel.config.values import (
    resolve_dispatcher,
    resolve_dtype,
    resolve_mp_policy,
    resolve_offload_policy,
)

__all__ = [
    "LEVERS_OF_BLOCKS",
    "SWITCHES_OF_LOSS",
    "DDPConfig",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "StageSwitches",
    "resolve_dispatcher",
    "resolve_dtype",
    "resolve_mp_policy",
    "resolve_offload_policy",
]
