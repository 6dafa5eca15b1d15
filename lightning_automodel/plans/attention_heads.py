"""Finds modules that compute with a number of heads, or their width: a rank with a share of them must count its share.

Most attention modules ask the width of a projection for the number of heads (``view(batch, seq, -1, head_dim)``), and
work on slices as they are. Others read an attribute. With ``view(batch, -1, num_heads, head_dim)`` slices would even
run, and mix the tokens of a sequence.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_automodel.distributed.logs import log_once
from lightning_automodel.modules.heads import HEADS, KEY_VALUE_HEADS, count_in_config, counts_of
from lightning_automodel.modules.matrices import WIDTH_OF_VIEW, Matrix, is_turned, out_features
from lightning_automodel.modules.reachable_code import names_in_code
from lightning_automodel.modules.structure import class_names
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import Style

LEVELS = 2
"""How far above a projection its attention module is: ``self_attn.q_proj``, or ``self_attn.q_proj.linear``."""
_WIDTHS = ("embed_dim", "all_head_size", "split_size", "inner_dim")
"""Attributes of attention modules that hold the width of all heads."""
_FUSED = 3  # query, key and value in one matrix


def head_counts(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, Style], blocks: Mapping[str, nn.Module], tp: int
) -> dict[str, dict[str, int]]:
    """Computes a rank's share of each attribute that counts heads, or holds the width of all of them, for the modules
    whose projections are split.

    Args:
        modules: all modules of the model by name.
        parameters: the style of each parameter that has one.
        blocks: the repeated blocks, whose other children are not looked at.
        tp: number of ranks.

    Raises:
        ValueError: if a module reads the number from its config, where other modules see it too.
    """
    shares: dict[str, dict[str, int]] = {}
    for name, style in parameters.items():
        if not style.opens or name.count(".") < 2:
            continue
        projection = name.rpartition(".")[0]
        for above in modules_above(projection, blocks):
            counts = _used_counts(modules[above], modules[projection])
            if counts:
                found = {attribute: share(attribute, count, tp) for attribute, count in counts.items()}
                shares[above] = shares.get(above, {}) | found
                break
            _check_config(above, modules[above], name)
    return shares


def widths_of_views(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, Style], tp: int
) -> dict[str, dict[str, int]]:
    """Computes a rank's share of the width that a layer which stores [in, out] gives its output by a view.

    Args:
        modules: all modules of the model by name.
        parameters: the style of each parameter that has one.
        tp: number of ranks.
    """
    found = {}
    for name, style in parameters.items():
        owner, _, short = name.rpartition(".")
        module = modules[owner]
        if short == "weight" and is_turned(module) and getattr(style.placement(short, 2), "dim", None) == 1:
            found[owner] = {WIDTH_OF_VIEW: getattr(module, WIDTH_OF_VIEW) // tp}
    return found


def share(attribute: str, count: int, tp: int) -> int:
    """Count the heads of one rank; with more ranks than key/value heads, several ranks use one of them."""
    return max(count // tp, 1) if attribute in KEY_VALUE_HEADS else count // tp


def modules_above(projection: str, blocks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the modules that may compute with what a projection gives, the nearest first, up to its block."""
    name = projection
    for level in range(LEVELS):
        name = name.rpartition(".")[0]
        if not name or (name in blocks and level > 0):
            return
        yield name
        if name in blocks:
            return


def _used_counts(module: nn.Module, projection: nn.Module) -> dict[str, int]:
    width = out_features(projection) if isinstance(projection, Matrix) else 0
    used = names_in_code(module)
    found = {attribute: count for attribute, count in counts_of(module).items() if attribute in used}
    widths = {attribute: getattr(module, attribute, None) for attribute in _WIDTHS if attribute in used}
    found |= {attribute: n for attribute, n in widths.items() if isinstance(n, int) and n in (width, width // _FUSED)}
    if found:
        log_once(f"{class_names(module)[0]}: its code counts heads by {', '.join(found)}")
    return found


def _check_config(name: str, module: nn.Module, parameter: str) -> None:
    if field := count_in_config(module):
        raise ValueError(
            f"the tensor-parallel plan splits {wildcard(parameter)}, so a rank has its share of the heads, but the "
            f"code of {wildcard(name)} ({type(module).__name__}) reads config.{field}, which counts all of them; "
            f"keep the number in an attribute of the module ({', '.join(HEADS)}), or leave its projections out of the "
            "plan"
        )
