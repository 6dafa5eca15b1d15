"""Cuts attention masks that a user gives for each head, where attention computes with a rank's heads.

::

    attention_mask [batch, heads, queries, keys]        GPU 0: heads 0-1     GPU 1: heads 2-3
    attention_mask [batch, 1, queries, keys]            whole on both
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel.modules.forward import code_of, named_arguments, wrap_forward
from lightning_automodel.modules.structure import find_blocks, outermost, text_config
from lightning_automodel.plans import Layout
from lightning_automodel.plans.selection import wildcard

_MASK = "attention_mask"


def install_head_masks(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Cut masks of all heads where they enter ``model``, once per pass, if all of its attention is split by heads."""
    heads = getattr(text_config(model), "num_attention_heads", None)
    blocks = find_blocks(model)
    reading = [
        name
        for name, module in model.named_modules()
        if outermost(list(blocks), name) not in (None, name) and _MASK in inspect.signature(code_of(module)).parameters
    ]
    if not isinstance(heads, int) or not reading or not set(reading) <= set(layout.boundaries):
        return
    per_rank = heads // group.size()

    def around(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = named_arguments(model, args, kwargs)
        mask = given.get(_MASK)
        if isinstance(mask, Tensor) and mask.ndim == 4 and 1 < mask.shape[1] == heads:
            if mask.requires_grad:
                raise ValueError(_cannot_train(reading[0], heads, group.size()))
            args, kwargs = (), {**given, _MASK: mask.narrow(1, group.rank() * per_rank, per_rank)}
        return forward(*args, **kwargs)

    wrap_forward(model, around)


def _cannot_train(attention: str, heads: int, tp: int) -> str:
    return (
        f"attention_mask has a gradient for each of {heads} heads, of which a rank has {heads // tp} with tp={tp}, "
        "and those of the ranks are not told apart where it enters attention. Leave attention whole, with a rule "
        f"'replicate' for each of its layers ({wildcard(attention)}.*) in "
        "FSDP2Config(tp_plan={'extends': 'model', ...}), or use tp=1"
    )
