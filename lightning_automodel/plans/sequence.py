"""Which children of a block see the whole sequence, and which parameters then have partial gradients."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.modules.structure import CONTAINERS, class_names, text_config
from lightning_automodel.plans.additions import WHOLE_BETWEEN_BLOCKS
from lightning_automodel.plans.styles import Leave, Style
from lightning_automodel.plans.tokenwise import keeps_tokens_apart, loops_keep_tokens_apart

STREAM_ARGUMENTS = (
    *("hidden_states", "per_layer_input", "block_states", "partial_block_states"),
    "prev_router_hidden_states",  # of Zaya: what a router gives to the next one
)
"""Arguments of a block, and of its children, that hold one row per token: the stream first."""


@dataclass(frozen=True, kw_only=True)
class ChildCollectives:
    """What surrounds a child of a block that sees the whole sequence.

    Attributes:
        sums_gradients: the gradients of what it takes are partial sums over tp.
        sums_output: what it gives is a partial sum over tp.
        gives_features: it gives this rank's features of all tokens, which a sibling sums: they are not cut.
    """

    sums_gradients: bool = False
    sums_output: bool = False
    gives_features: bool = False


@dataclass
class SequenceLayout:
    """Sequence parallelism of a model.

    Attributes:
        block_lists: names of the blocks of each list that runs on a cut stream, in order.
        children: by block, the children that see the whole sequence.
        sliced: names of the parameters that see a slice of the sequence only.
        mixing: classes of blocks whose own code may mix tokens: their stream stays whole.
        beside: streams that the blocks hold beside each other for each token: [batch, seq, beside, features].
    """

    block_lists: list[list[str]] = field(default_factory=list)
    children: dict[str, dict[str, ChildCollectives]] = field(default_factory=dict)
    sliced: set[str] = field(default_factory=set)
    mixing: set[str] = field(default_factory=set)
    beside: int | None = None


def derive_sequence_layout(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    boundaries: Sequence[str],
    planned: set[str],
    styles_below: Callable[[str], list[Style]],
) -> SequenceLayout:
    """Finds the children by structure: those that hold a planned module or a matrix see the whole sequence.

    Args:
        model: the whole model.
        blocks: its blocks by name.
        boundaries: names of the boundary children.
        planned: names of modules and parameters that the plan names.
        styles_below: the styles of a module and of all inside of it, by its name.
    """
    layout = SequenceLayout(beside=getattr(text_config(model), "hc_mult", None))  # hyper-connections
    lists: dict[str, list[str]] = {}
    for name in blocks:
        if any(other.startswith(f"{name}.") for other in planned):
            lists.setdefault(name.rpartition(".")[0], []).append(name)
    for list_name, names in lists.items():
        if mixing := {type(blocks[name]).__name__ for name in names if not keeps_tokens_apart(blocks[name])}:
            layout.mixing |= mixing
            continue
        holder = model.get_submodule(list_name.rpartition(".")[0])
        is_apart = computes_between_blocks(holder) or runs_others_between(model, list_name, names)
        layout.block_lists += [[name] for name in names] if is_apart else [names]
        for name in names:
            children = {
                child: _collectives(child, boundaries, styles_below(child))
                for child in _whole_children(blocks[name], name, planned)
            }
            layout.children[name] = children
            for parameter, _ in blocks[name].named_parameters(name):
                if not any(parameter.startswith(f"{child}.") for child in children):
                    layout.sliced.add(parameter)
    return layout


def computes_between_blocks(holder: nn.Module) -> bool:
    """Tell whether a module changes the stream between its blocks, where it must be whole.

    This is known of its class, told by an argument for features of a vision tower that are added to single tokens there
    ("deepstack"), or cannot be excluded of code that is not transformers'.
    """
    takes_features = any(name.startswith("deepstack") for name in inspect.signature(holder.forward).parameters)
    is_known = takes_features or any(name in WHOLE_BETWEEN_BLOCKS for name in class_names(holder))
    return is_known or not loops_keep_tokens_apart(holder)


def runs_others_between(model: nn.Module, list_name: str, blocks: list[str]) -> bool:
    """Tell whether a list of ``model`` holds more than ``blocks``: a user's layers among those of a model, or one of
    them twice.
    """
    members = model.get_submodule(list_name)
    places = [id(member) for member in own_children(members).values() if member is not None]
    if len(set(places)) < len(places):
        return True
    others = {f"{list_name}.{name}" for name, member in members.named_children() if not isinstance(member, nn.Identity)}
    return isinstance(members, CONTAINERS) and not others <= set(blocks)


def _whole_children(module: nn.Module, name: str, planned: set[str]) -> list[str]:
    found: list[str] = []
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}"
        if isinstance(child, CONTAINERS):
            found += _whole_children(child, full, planned)
        elif _mixes_tokens(child, full, planned):
            found.append(full)
    return found


def _collectives(name: str, boundaries: Sequence[str], styles: list[Style]) -> ChildCollectives:
    """Describes a child by its ``styles``: a column style without a row style behind it leaves features split."""
    if name in boundaries:
        return ChildCollectives(sums_gradients=True, sums_output=True)
    opens = any(style.opens and style.leave is Leave.NONE for style in styles)
    return ChildCollectives(gives_features=opens and not any(style.closes for style in styles))


def _mixes_tokens(module: nn.Module, name: str, planned: set[str]) -> bool:
    if any(p.ndim >= 2 for p in module.parameters()) or not all(map(keeps_tokens_apart, module.modules())):
        return True
    return any(n == name or n.startswith(f"{name}.") for n in planned)
