"""Lets the root of FSDP2's units begin first, whichever unit is called first.

FSDP2 takes the first unit that is called for the root, and refuses the real one later. A user may call an embedding
before its model.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_automodel._compat.fsdp2.units import fsdp_units


def begin_with_root(root: nn.Module) -> None:
    """Let every unit in ``root`` begin the work of ``root`` in the place of its own."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for unit in fsdp_units(root):
        inner: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
        if inner is not state:
            inner._lazy_init = state._lazy_init
