"""PyTorch Lightning strategies that train any Hugging Face model on any number of devices, exactly."""

import lightning_automodel._compat.messages  # noqa: F401 (before torchao is imported)
from lightning_automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.strategies import DDPStrategy, FSDP2TPStrategy, MegatronFSDPStrategy

__all__ = [
    "DDPConfig",
    "DDPStrategy",
    "FSDP2Config",
    "FSDP2TPStrategy",
    "MegatronFSDPConfig",
    "MegatronFSDPStrategy",
    "parallelize",
]
