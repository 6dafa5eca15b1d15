"""Derives the layout of a model, adapters included: of what they wrap first, then of what they add."""

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel.modules.structure import find_blocks
from lightning_automodel.modules.wrappers import has_copies, is_wrapper, name_without_wrappers, without_wrappers
from lightning_automodel.plans.adapters import Wrapped
from lightning_automodel.plans.known_code import is_known
from lightning_automodel.plans.layout import Layout, ModuleLayout, ParameterLayout, layout_of
from lightning_automodel.plans.selection import Plan
from lightning_automodel.plans.sequence import SequenceLayout
from lightning_automodel.plans.structure import Structure
from lightning_automodel.plans.styles import Enter
from lightning_automodel.plans.sum_terms import derive_terms, find_holders

_OF_THE_LAYER = (Enter.EMBED, Enter.NORM)
"""What replaces the forward pass of the layer itself; all else surrounds its wrapper."""


def derive_layout(model: nn.Module, plan: Plan, tp: int, sequence_parallel: bool = False) -> Layout:
    """Applies the rules of ``layout.py`` to ``model``, whose parameters may be on the meta device.

    Args:
        model: whose blocks, children and parameters are looked at.
        plan: its rules.
        tp: number of ranks of the tp axis.
        sequence_parallel: cut the stream between the children of a block on the sequence.

    Raises:
        ValueError: for a style that is not known, does not fit its module, or sums what is whole, a number of heads
            that cannot be divided, an adapter of which it is not known how it is split, or tied parameters whose styles
            contradict each other.
    """
    with without_wrappers(model) as has_wrappers:
        structure, layout = layout_of(model, plan, tp, sequence_parallel)
    if has_wrappers:
        _follow_wrappers(model, layout, structure)
    layout.terms = derive_terms(
        structure.modules, structure.module_styles, structure.parameter_styles, layout.boundaries, plan.measured
    )
    layout.holders = find_holders(
        structure.modules, structure.module_styles, layout.boundaries, plan.measured, find_blocks(model)
    )
    layout.measured = plan.measured and all(map(is_known, structure.modules.values()))
    return layout


def _follow_wrappers(model: nn.Module, layout: Layout, structure: Structure) -> None:
    """Rewrites what was derived without wrappers for the names that ``model`` has with them, in place."""
    structure.modules = dict(model.named_modules())
    inside = {n: name_without_wrappers(n) for n, module in structure.modules.items() if not is_wrapper(module)}
    parameters, parameter_styles = layout.parameters, structure.parameter_styles
    layout.parameters, structure.parameter_styles = {}, {}
    row_norms: dict[str, ModuleLayout] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = name_without_wrappers(name)
        if plain not in parameters:
            wrapped = Wrapped.of(model, name)
            if wrapped.base not in parameters:
                raise ValueError(wrapped.unknown())
            base = parameters[wrapped.base]
            layout.parameters[name] = _adapter_layout(wrapped, parameter, base)
            if wrapped.normalizes_rows and wrapped.cuts_input(base.placement):
                row_norms[name.rpartition(".")[0]] = ModuleLayout(Enter.ROW_NORM)
            plain = wrapped.base if layout.parameters[name].placement != Replicate() else name
        else:
            layout.parameters[name] = parameters[plain]
        if plain in parameter_styles:
            structure.parameter_styles[name] = parameter_styles[plain]
    styles = structure.module_styles
    structure.module_styles = {n: styles[plain] for n, plain in inside.items() if plain in styles}
    layout.attributes = {n: layout.attributes[plain] for n, plain in inside.items() if plain in layout.attributes}
    layout.modules = _around_wrappers(structure.modules, layout.modules) | row_norms
    layout.boundaries = [place for name in layout.boundaries for place in _places(structure.modules, name)]
    if layout.sequence is not None:
        _run_copies(layout.sequence, structure.modules)


def _places(modules: dict[str, nn.Module], name: str) -> list[str]:
    """Name what stands where the module ``name`` stood: itself, or its like in each of the copies of a block."""
    if name in modules and not has_copies(modules[name]):
        return [name]
    like = [n for n in modules if name_without_wrappers(n) == name and not n.endswith(".base_layer")]
    return [n for n in like if not has_copies(modules[n])]


def _run_copies(sequence: SequenceLayout, modules: dict[str, nn.Module]) -> None:
    """Put each copy of a block (``modules_to_save``) on the stream in the place of the wrapper, in place."""
    copies = {
        block: [n for n, m in modules.items() if name_without_wrappers(n) == block and not is_wrapper(m)]
        for block in sequence.children
        if has_copies(modules[block])
    }
    sequence.block_lists = [
        [n for block in blocks for n in copies.get(block, [block])] for blocks in sequence.block_lists
    ]
    sequence.children = {
        copy: {f"{copy}{child.removeprefix(block)}": collectives for child, collectives in children.items()}
        for block, children in sequence.children.items()
        for copy in copies.get(block, [block])
    }


def _adapter_layout(wrapped: Wrapped, parameter: nn.Parameter, base: ParameterLayout) -> ParameterLayout:
    if base.shared_heads and wrapped.role.of_output == 0:
        return base
    if base.placement.is_replicate():
        return ParameterLayout(Replicate(), base.gradient, sliced=base.sliced)
    placement = wrapped.cut(base.placement, tuple(parameter.shape))
    if isinstance(placement, StridedShard) and placement.dim == 0:
        # FSDP2 cuts dim 0 as well, and does not tell a cut of stacked matrices from one of its own.
        return ParameterLayout(Replicate(), Partial(), stacked=int(placement.split_factor))
    if placement != Replicate():
        return ParameterLayout(placement, placement)
    gradient = Replicate() if wrapped.takes_rows(base.placement) else Partial()
    of_sum = wrapped.name.endswith(".bias") and wrapped.cuts_input(base.placement)
    return ParameterLayout(Replicate(), gradient, on_first_rank=of_sum)


def _around_wrappers(modules: dict[str, nn.Module], layouts: dict[str, ModuleLayout]) -> dict[str, ModuleLayout]:
    """Collectives surround the outermost wrapper of a layer; copies that train in its place have each their own."""
    found: dict[str, ModuleLayout] = {}
    for name, module in modules.items():
        layout = layouts.get(name_without_wrappers(name))
        if layout is None:
            continue
        is_outermost = not name.endswith(".base_layer") and not has_copies(module)
        if not is_wrapper(module) if layout.enter in _OF_THE_LAYER else is_outermost:
            found[name] = layout
    return found
