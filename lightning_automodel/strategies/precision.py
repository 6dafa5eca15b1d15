"""Translates ``Trainer(precision=...)`` into dtypes of storage, compute and reduction under FSDP2."""

from typing import Literal, get_args

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

PrecisionName = Literal["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]

_STORED = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_COMPUTED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FSDP2Precision(Precision):
    """Precision of parameters and compute under FSDP2; buffers keep their dtype.

    ============  ==================  =======================================
    precision     parameters stored   compute / reduction of gradients
    ============  ==================  =======================================
    32-true       float32             float32 / float32
    bf16-true     bfloat16            bfloat16 / float32
    bf16-mixed    float32             bfloat16 / float32
    16-mixed      float32             float16 / float32, with loss scaling
    16-true       float16             float16 / float32
    ============  ==================  =======================================
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"precision={precision!r} is not supported by this strategy; use one of {', '.join(get_args(PrecisionName))}"
            )
        self.precision = precision
        self.param_dtype = _STORED.get(precision, torch.float32)
        compute = _COMPUTED.get(precision)
        reduce = torch.float32 if precision != "32-true" else None
        self.mp_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def convert_precision(plugin: Precision | None) -> FSDP2Precision:
    """The FSDP2 form of the plugin that Lightning made from ``Trainer(precision=...)``."""
    if isinstance(plugin, FSDP2Precision):
        return plugin
    return FSDP2Precision(plugin.precision if plugin is not None else "32-true")  # type: ignore[arg-type]
