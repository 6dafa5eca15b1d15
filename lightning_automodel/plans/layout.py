"""Derives what a plan means for every parameter and module of a model: a pure function of the model's structure.

The rules are those that were exact for every family (the letters are used in the comments below):

* A. Where whole values meet split ones, the gradient of the whole value is a partial sum.
* B. Collectives surround the *boundary child* of a block (attention, feed-forward): everything inside works on slices.
* C. Outside of boundaries a whole parameter has a whole gradient unless its style says otherwise.
"""

from dataclasses import dataclass, field, replace

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel.modules.heads import HEADS, counts_of
from lightning_automodel.modules.structure import (
    KEY_VALUE_PROJECTIONS,
    find_blocks,
    kv_heads,
    outermost,
)
from lightning_automodel.plans.attention_heads import head_counts, share, widths_of_views
from lightning_automodel.plans.companions import leave_companions_whole
from lightning_automodel.plans.read_weights import check_read_weights
from lightning_automodel.plans.selection import Plan, wildcard
from lightning_automodel.plans.sequence import SequenceLayout, derive_sequence_layout
from lightning_automodel.plans.structure import Structure
from lightning_automodel.plans.style_checks import check_ends, check_places, check_styles, check_sums
from lightning_automodel.plans.styles import Enter, Leave, Style
from lightning_automodel.plans.sum_terms import Term
from lightning_automodel.plans.uneven_heads import styles_of_uneven_heads

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies on the tp axis.

    Attributes:
        placement: of the stored parameter.
        gradient: of the gradient that the backward pass gives for it.
        on_first_rank: the value counts on the first rank only (a bias that is added to partial sums).
        shared_heads: the parameter holds this many key/value heads, fewer than ranks; a rank uses one of them.
        stacked: the parameter stays whole, and is this many matrices one above the other; a rank uses its rows of each.
        sliced: it works on a slice of the sequence while the stream is cut; the gradient is then a partial sum.
    """

    placement: Placement
    gradient: Placement
    on_first_rank: bool = False
    shared_heads: int | None = None
    stacked: int | None = None
    sliced: bool = False

    def rows(self, size: int, tp: int, rank: int) -> Rows:
        """Find what a rank uses of a whole parameter of ``size`` rows: start and length of each part, none for all."""
        if self.shared_heads:
            per_head = size // self.shared_heads
            return ((rank * self.shared_heads // tp * per_head, per_head),)
        if self.stacked:
            width, length = size // self.stacked, size // self.stacked // tp
            return tuple((i * width + rank * length, length) for i in range(self.stacked))
        return ()


@dataclass(frozen=True)
class ModuleLayout:
    """The collectives around one module."""

    enter: Enter = Enter.NONE
    leave: Leave = Leave.NONE


@dataclass
class Layout:
    """The whole model: every parameter by name, and the modules that take collectives."""

    parameters: dict[str, ParameterLayout] = field(default_factory=dict)
    modules: dict[str, ModuleLayout] = field(default_factory=dict)
    boundaries: list[str] = field(default_factory=list)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """attributes of modules that change: the number of heads, or of query heads per key/value head"""
    sequence: SequenceLayout | None = None
    terms: dict[str, dict[str, Term]] = field(default_factory=dict)
    """by boundary that its first forward pass must prove to be a sum over the ranks: the members that give the terms"""
    holders: list[str] = field(default_factory=list)
    """other modules whose own code computes with a rank's part of features, which their first forward pass must prove
    right"""
    claimed: list[str] = field(default_factory=list)
    """whole parameters outside of boundaries of which only the plan says that their gradients are partial sums"""
    measured: bool = True
    """all that runs was compared with one process: the plan, and the code of every module"""

    @property
    def is_tried(self) -> bool:
        """Tell whether modules have to prove in their first forward pass that they are right on slices."""
        return bool(self.terms or self.holders)


def layout_of(model: nn.Module, plan: Plan, tp: int, sequence_parallel: bool) -> tuple[Structure, Layout]:
    """Applies the rules above to a model without adapters; ``Layout.terms`` is still empty."""
    structure, blocks = _structure_of(model, plan, tp), find_blocks(model)
    places = structure.names_of([b for block in blocks for b in structure.boundaries(block)])
    check_places(model, places, "the tensor-parallel plan splits")
    layout = Layout(boundaries=list(dict.fromkeys(map(structure.first_name, places))))
    layout.attributes = head_counts(structure.modules, structure.parameter_styles, blocks, tp)
    layout.attributes |= widths_of_views(structure.modules, structure.parameter_styles, tp)
    for name, style in structure.module_styles.items():
        if outermost(layout.boundaries, name) is None:
            layout.modules[name] = ModuleLayout(style.enter, style.leave)
        elif style.enter in (Enter.DIVIDE, Enter.NORM):
            layout.modules[name] = ModuleLayout(style.enter)
        if style.divides:
            layout.attributes[name] = _shares(name, structure.modules[name], style, tp)
    for name in layout.boundaries:
        own = structure.module_styles.get(name)
        leave = Leave.REDUCE_ALL if own and own.leave is Leave.REDUCE_ALL else Leave.REDUCE
        layout.modules[name] = ModuleLayout(Enter.COPY_ALL, leave)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = outermost(places, name) is not None or outermost(layout.boundaries, name) is not None
        found = structure.parameter_styles.get(name)
        layout.parameters[name] = _parameter_layout(name, parameter, found, inside)
        if found is not None and found.partial and not inside:
            layout.claimed.append(name)
    split = [name.rpartition(".")[0] for name, found in layout.parameters.items() if not found.placement.is_replicate()]
    check_read_weights(structure.modules, split, [*blocks, *layout.boundaries])
    share_heads(model, layout, tp)
    if sequence_parallel:
        planned = structure.module_styles.keys() | structure.parameter_styles.keys()
        sequence = derive_sequence_layout(model, blocks, layout.boundaries, planned, structure.styles_below)
        _cut_sequence(layout, sequence)
        whole = structure.names_of([child for children in sequence.children.values() for child in children])
        check_places(model, structure.names_of(sequence.children), "sequence_parallel=True cuts", but=whole)
    return structure, layout


def _structure_of(model: nn.Module, plan: Plan, tp: int) -> Structure:
    """Looks at a model through its plan, with other styles where ``tp`` does not divide heads, and checks these."""
    structure = Structure(model, plan)
    structure.restyle(styles_of_uneven_heads(model, structure.module_styles, tp))
    styles = (structure.modules, structure.module_styles, structure.parameter_styles)
    leave_companions_whole(*styles)
    check_styles(*styles)
    check_sums(*styles, plan.dropped)
    check_ends(*styles)
    return structure


def _shares(name: str, module: nn.Module, style: Style, tp: int) -> dict[str, int]:
    counts = counts_of(module)
    if not counts:
        raise ValueError(
            f"the tensor-parallel plan gives {wildcard(name)!r} ({type(module).__name__}) the style {style.name}, but "
            f"it has no attribute that counts heads ({', '.join(HEADS)}); leave the rule out"
        )
    return {attribute: share(attribute, count, tp) for attribute, count in counts.items()}


def _cut_sequence(layout: Layout, sequence: SequenceLayout) -> None:
    """Joins the collectives around a child with those that make the sequence whole for it, and marks what sees a
    slice of the tokens.
    """
    layout.sequence = sequence
    for children in sequence.children.values():
        for name, child in children.items():
            collectives = layout.modules.get(name)
            if collectives == ModuleLayout(enter=Enter.COPY):
                children[name] = replace(child, sums_gradients=True)
            elif collectives == ModuleLayout(leave=Leave.REDUCE):
                children[name] = replace(child, sums_output=True)
            if children[name].sums_gradients or children[name].sums_output:
                del layout.modules[name]
    for name in sequence.sliced:
        parameter = layout.parameters[name]
        if parameter.placement.is_replicate():
            layout.parameters[name] = replace(parameter, sliced=True)


def _parameter_layout(name: str, parameter: nn.Parameter, style: Style | None, inside: bool) -> ParameterLayout:
    placement = style.placement(name.rpartition(".")[2], parameter.ndim) if style else Replicate()
    if isinstance(placement, StridedShard) and parameter.ndim == 1:
        # FSDP2 cuts dim 0 as well, and what is left of stacked parts no placement describes.
        return ParameterLayout(Replicate(), Partial(), stacked=int(placement.split_factor))
    if not placement.is_replicate():
        return ParameterLayout(placement, placement)
    row_bias = style is not None and style.leave in (Leave.REDUCE, Leave.REDUCE_SPLIT) and name.endswith("bias")
    partial = inside or row_bias or (style is not None and style.partial)
    return ParameterLayout(placement, Partial() if partial else Replicate(), on_first_rank=row_bias)


def share_heads(model: nn.Module, layout: Layout, tp: int) -> None:
    """Keeps key/value projections whole where there are more ranks than heads (rule G): each rank uses the head of its
    query heads; several ranks use the same head, so the gradient is a partial sum.
    """
    for name, parameter in layout.parameters.items():
        owner, _, _ = name.rpartition(".")
        parent, _, projection = owner.rpartition(".")
        heads = kv_heads(model.get_submodule(parent)) if projection in KEY_VALUE_PROJECTIONS else None
        gathered = owner in layout.modules and layout.modules[owner].leave is Leave.GATHER  # then heads are not split
        if heads is None or heads >= tp or parameter.placement != Shard(0) or gathered:
            continue
        layout.parameters[name] = ParameterLayout(Replicate(), Partial(), shared_heads=heads)
        attention = model.get_submodule(parent)
        groups = int(getattr(attention, "num_key_value_groups", 1)) * heads // tp
        layout.attributes[parent] = {**layout.attributes.get(parent, {}), "num_key_value_groups": groups}
