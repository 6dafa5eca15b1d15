"""Cuts what attention is handed for each head, where it computes with a rank's heads: masks, biases of positions.

::

    attention_mask [batch, heads, queries, keys]        GPU 0: heads 0-1     GPU 1: heads 2-3
    attention_mask [batch, 1, queries, keys]            whole on both
    position_bias  [1, heads, queries, keys]            GPU 0: heads 0-1     GPU 1: heads 2-3
    alibi          [batch * heads, 1, keys]             GPU 0: heads 0-1     GPU 1: heads 2-3     of each row
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.collectives import split
from lightning_automodel.modules.forward import arguments_of, code_of, named_arguments, wrap_forward
from lightning_automodel.modules.heads import BIASES_OF_HEADS, counts_of, heads_of
from lightning_automodel.modules.structure import (
    class_names,
    configs_of_layers,
    find_blocks,
    names_around,
    outermost,
    text_config,
)
from lightning_automodel.parallel.tensor.trial_weights import is_whole_now
from lightning_automodel.plans import Layout
from lightning_automodel.plans.additions import READS_BIASES_IN_MASKS
from lightning_automodel.plans.selection import layers_of
from lightning_automodel.plans.styles import Enter, Leave

_MASK = "attention_mask"
_MASKS = (_MASK, "mask")
"""Names of masks in attention modules."""


def install_head_masks(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Cut masks of all heads where they enter ``model``, once per pass, if all of its attention is split by heads."""
    first, *others = [getattr(c, "num_attention_heads", None) for c in configs_of_layers(text_config(model))]
    heads = first if all(other == first for other in others) else None  # of stages it is a list
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
                layers = layers_of(reading[0], model.get_submodule(reading[0]))
                raise ValueError(_cannot_train(layers, heads, group.size()))
            args, kwargs = (), {**given, _MASK: mask.narrow(1, group.rank() * per_rank, per_rank)}
        return forward(*args, **kwargs)

    wrap_forward(model, around)


def around_parts(layout: Layout) -> set[str]:
    """Name the modules whose code has a rank's part of features, by the layers in them that are cut, and neither join
    what they give nor cut what they take.
    """
    whole = [n for n, found in layout.modules.items() if found.leave is Leave.GATHER or found.enter is Enter.SPLIT]
    cut = (name for name, found in layout.parameters.items() if not found.placement.is_replicate())
    return names_around(name for name in cut if outermost(whole, name) is None)


def install_head_biases(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Cut what enters attention with a rank's heads, and has numbers of all of them.

    What the first layer makes of its own table has a rank's heads already.
    """
    handed = {
        name: heads
        for name in around_parts(layout) - find_blocks(model).keys()  # they may count heads, too
        if (heads := heads_of(counts_of(module := model.get_submodule(name)))) is not None
        if _is_handed_biases(module)
    }
    for name in handed.keys() - names_around(handed):
        is_divided = heads_of(layout.attributes.get(name, {})) is not None
        per_rank = handed[name] if is_divided else handed[name] // group.size()
        is_copied_in = outermost(layout.boundaries, name) is not None
        wrap_forward(model.get_submodule(name), _Handed(per_rank, group, is_copied_in).around)


def _is_handed_biases(attention: nn.Module) -> bool:
    own = not BIASES_OF_HEADS.isdisjoint(arguments_of(attention))
    return own or not READS_BIASES_IN_MASKS.isdisjoint(class_names(attention))


class _Handed:
    """Cuts arguments of an attention module.

    Args:
        heads: of a rank.
        group: over tp.
        is_copied_in: what enters has its gradients summed over the ranks; else they are collected here.
    """

    def __init__(self, heads: int, group: ProcessGroup, is_copied_in: bool) -> None:
        self.heads, self.group, self.is_copied_in = heads, group, is_copied_in

    def around(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``forward`` with a rank's share of each."""
        if is_whole_now():
            return forward(*args, **kwargs)
        given = named_arguments(module, args, kwargs)
        rows = next((x.shape[0] for x in given.values() if isinstance(x, Tensor)), 0)
        cut = {name: self._cut(name, given[name], rows) for name in (*_MASKS, *BIASES_OF_HEADS) if name in given}
        return forward(**{**given, **cut})

    def _cut(self, name: str, value: Any, rows: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim < (4 if name in _MASKS else 3):
            return value
        heads = self.heads * self.group.size()
        if value.shape[-3] == heads:
            return self._own(value, value.ndim - 3)
        if value.ndim == 3 and value.shape[0] == rows * heads:
            return self._own(value.unflatten(0, (rows, heads)), 1).flatten(0, 1)
        return value

    def _own(self, value: Tensor, dim: int) -> Tensor:
        if self.is_copied_in:
            return value.narrow(dim, self.group.rank() * self.heads, self.heads)
        return split(value, dim, self.group)


def _cannot_train(layers: str, heads: int, tp: int) -> str:
    return (
        f"attention_mask has a gradient for each of {heads} heads, of which a rank has {heads // tp} with tp={tp}, "
        "and those of the ranks are not told apart where it enters attention. Leave attention whole, with a rule "
        f"'replicate' for each of its layers ({layers}) in "
        "FSDP2Config(tp_plan={'extends': 'model', ...}), or use tp=1"
    )
