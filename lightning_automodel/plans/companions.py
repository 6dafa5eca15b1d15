"""Finds what a plan divides with the heads of an attention whose layers give all heads: it must stay whole, too.

::

    q_proj, k_proj, v_proj     colwise                  colwise_gather_output, or replicate
    sinks [heads]              a rank's heads           all heads
    kv_a_proj_with_mqa         gradients are summed     they are whole
"""

from collections.abc import Mapping

from torch import nn

from lightning_automodel.modules.matrices import Matrix
from lightning_automodel.plans.styles import Leave, Style


def leave_companions_whole(
    modules: Mapping[str, nn.Module], module_styles: dict[str, Style], parameter_styles: dict[str, Style]
) -> None:
    """Take out of styles, in place, what goes with a rank's heads where all layers of an attention take and give all.

    A user's rules for the layers (``"extends": "model"``) leave in the plan what it has beside them.
    """
    whole = {name for name, style in module_styles.items() if style.joins or style.name == "replicate"}
    for parent in {name.rpartition(".")[0] for name in whole if isinstance(modules[name], Matrix)} - {""}:
        inside = {name: style for name, style in module_styles.items() if name.startswith(f"{parent}.")}
        beside = {name for name, style in inside.items() if _goes_with_heads(style)}
        if inside.keys() <= whole | beside:
            known = {id(p) for name in whole & inside.keys() for p in modules[name].parameters()}
            own = modules[parent].named_parameters(parent, recurse=False)
            vectors = {n for n, p in own if p.ndim == 1 and id(p) not in known}  # a head's bias may stand there, too
            inner = {n for name in beside for n, _ in modules[name].named_parameters(name)}
            for name in beside:
                del module_styles[name]
            for name in vectors | inner:
                parameter_styles.pop(name, None)


def _goes_with_heads(style: Style) -> bool:
    return style.name == "embedding_of_heads" or style.leave is Leave.COPY_ROTARY or style.partial
