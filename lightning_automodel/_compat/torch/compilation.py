"""Private names of torch's compiler: what it wraps, and switches that only its own settings have."""

from collections import OrderedDict

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.utils import dict_keys_getitem
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

__all__ = ["OptimizedModule"]


def unwrap_compiled(module: OptimizedModule) -> nn.Module:
    """Return what ``torch.compile`` wrapped."""
    return module._orig_mod


def allow_records_in_checkpoints() -> None:
    """Let a compiled graph hold a checkpointed block that records values, such as router logits.

    torch refuses that unless told that a recomputation may leave it out; only a setting of the process says so.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def finds_prepended_hooks() -> bool:
    """Tell whether the compiler finds a hook that was prepended; before torch 2.13 it takes another one for it.

    It numbers hooks in the order of the plain dict that their table, an ``OrderedDict``, is below, in which a prepended
    one is the last. An older one looks the number up in the order of the table.
    """
    table = OrderedDict(first=None, prepended=None)
    table.move_to_end("prepended", last=False)
    return dict_keys_getitem(table, 0) == "first"


def overlap_in_compiled_graphs(group: dist.ProcessGroup) -> None:
    """Lets inductor fuse the collectives of ``group`` with the matrix products beside them.

    Both the switch of the pass and the registration of a group for symmetric memory are private (torchtitan does this).
    """
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)
