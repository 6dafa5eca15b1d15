"""Lets each rank compute all heads of an attention whose heads tp does not divide; its matrices are split all the same.

::

    28 heads, tp=8    enter               local matmul               leave
    whole x ------->  COPY  ----------->  x @ W[rows of rank] ---->  GATHER --->  q, k, v of all heads
    all heads ----->  SPLIT ----------->  x @ W[columns of rank] ->  REDUCE --->  whole

So plans of transformers split attention that is not cut by heads (Phi-3): ``colwise_gather_output`` and
``rowwise_split_input``. A rank stores its share of the weights, and the numbers are the same; but all ranks compute the
scores of all heads, and what the projections give travels. So do feed-forwards whose packed matrices (gate and up in
one) have widths that tp does not divide.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.heads import KEY_VALUE_HEADS, computes_heads, counts_of, heads_of
from lightning_automodel.modules.matrices import Matrix, out_features
from lightning_automodel.modules.reachable_code import names_in_code
from lightning_automodel.modules.structure import config_of, find_blocks, heads_in, kv_heads, nearest_config, outermost
from lightning_automodel.plans.attention_heads import modules_above
from lightning_automodel.plans.counts import Count, check_counts, fitting_sizes, listed
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import STYLES, Enter, Leave, Style

Styles = dict[str, Style]

_DIVIDES_FEATURES = {"view", "reshape", "unflatten", "rearrange"}
"""Names in the code of modules that give features dimensions of their own."""


def styles_of_uneven_heads(model: nn.Module, styles: Styles, tp: int) -> dict[str, Styles]:
    """Find attention that is split by heads which ``tp`` does not divide, and packed matrices; warn of these once.

    Args:
        model: its parameters may be on the meta device.
        styles: of its modules that a plan names.
        tp: number of ranks.

    Returns:
        by the name of the module around such layers: styles of what stands in it, in the place of those that it has.
        What has none there stays whole.

    Raises:
        ValueError: if it is not known which layer writes what such an attention computes, or how code divides features.
    """
    found: dict[str, Styles] = {}
    told: dict[str, str] = {}
    every: list[Count] = []
    for holder, counts in _counts_by_holder(model, styles).items():
        every += counts
        if holder is None:
            check_counts(type(model).__name__, tp, counts)
        elif wrong := [count for count in counts if not count.allows(tp)]:
            found[holder] = _gathering({n: s for n, s in styles.items() if f"{n}.".startswith(f"{holder}.")})
            told[wildcard(holder)] = f"{listed(wrong)} of {wildcard(holder)}"
    if found:
        sizes = ", ".join(str(size) for size in fitting_sizes(every) if 1 < size < tp)
        faster = f"; a tp that divides is faster ({sizes})" if sizes else ""
        warn_once(
            f"tp={tp} does not divide {' and '.join(told.values())}: each rank computes all of that, with its part of "
            f"the matrices. The numbers are the same{faster}"
        )
    return found


def _counts_by_holder(model: nn.Module, styles: Styles) -> dict[str | None, list[Count]]:
    """Count what a rank would have a share of, heads or rows of packed matrices, by the module around the layers.

    That is the nearest one in which something sums over the ranks; ``None`` where only the whole block has such a one,
    and for modules that divide features and do not tell how.
    """
    modules, blocks = dict(model.named_modules()), find_blocks(model)
    closing = [name for name, style in styles.items() if style.closes]
    groups: dict[str | None, dict[Count, None]] = {}
    for name, style in styles.items():
        layer, above, parent = modules[name], list(modules_above(name, blocks)), name.rpartition(".")[0]
        if not isinstance(layer, Matrix) or not _opens(style):
            continue
        attention = next((module for module in above if computes_heads(modules[module])), None)
        placement = style.placement("weight", 2)
        if attention is not None:
            holder, counts = _holder(attention, closing, blocks), list(_counts_of_attention(model, attention))
        elif isinstance(placement, StridedShard):
            matrices = int(placement.split_factor)
            counts = [Count(f"width of each of the {matrices} matrices", out_features(layer) // matrices)]
            holder = _holder(parent, closing, blocks)
        elif _DIVIDES_FEATURES & names_in_code(modules[parent]) and not _has_heads(name, blocks):
            holder, counts = None, list(_counts_of_attention(model, parent))
        else:
            continue
        groups.setdefault(holder, {}).update(dict.fromkeys(counts))
    return {holder: list(counts) for holder, counts in groups.items()}


def _has_heads(name: str, blocks: dict[str, nn.Module]) -> bool:
    """Tell whether something in the block around a module computes heads: what else divides features has none."""
    block = outermost(list(blocks), name)
    return block is not None and any(computes_heads(module) for module in blocks[block].modules())


def _opens(style: Style) -> bool:
    return style.enter is Enter.COPY and style.leave is Leave.NONE


def _holder(attention: str, closing: list[str], blocks: dict[str, nn.Module]) -> str | None:
    around = attention
    while around and (around == attention or around not in blocks):
        if any(name.startswith(f"{around}.") for name in closing):
            return around
        around = around.rpartition(".")[0]
    return None


def _gathering(styles: Styles) -> Styles:
    """Return styles with which the layers give and take all features."""
    gathering = {}
    for name, style in styles.items():
        if style.enter is Enter.COPY and (style.opens or style.leave is Leave.GATHER):
            gathering[name] = STYLES["colwise_gather_output"]
        elif style.closes or style.enter is Enter.SPLIT:
            gathering[name] = STYLES["rowwise_split_input"]
    return gathering


def _counts_of_attention(model: nn.Module, name: str) -> Iterator[Count]:
    """Count the heads of queries, and those of keys and values, by what the module ``name`` has, else by its config."""
    module = model.get_submodule(name)
    counts, config = counts_of(module), getattr(module, "config", None) or nearest_config(model, name)
    config = config_of(module, config)
    heads = heads_of(counts) or _int(config, "num_attention_heads")
    of_layer = heads_in(module, "q_proj")  # of gated attention twice as many, and of single layers others
    yield from (Count("num_attention_heads", n) for n in dict.fromkeys((heads, of_layer)) if n)
    own = next((counts[key] for key in KEY_VALUE_HEADS if key in counts), None)
    in_projection = kv_heads(module)  # a head of which several ranks can use
    shared = in_projection or own or _int(config, "num_key_value_heads")
    if shared:
        yield Count("num_key_value_heads", shared, shared=in_projection is not None)


def _int(config: Any, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) else None
