"""The public door to Megatron-FSDP for loops of one's own. For Lightning: ``MegatronFSDPStrategy``."""

from lightning_automodel.parallel.megatron_fsdp import (
    HAVE_MEGATRON_FSDP,
    accumulating,
    clip_grad_norm_,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)

__all__ = [
    "HAVE_MEGATRON_FSDP",
    "accumulating",
    "clip_grad_norm_",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
]
