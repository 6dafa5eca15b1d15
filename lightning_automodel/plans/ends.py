"""Finds rules for the ends of a model: the embedding of tokens, other large tables, and the head."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from lightning_automodel.modules.reachable_code import reads_matrix_of
from lightning_automodel.modules.structure import find_blocks, find_names_of_ends, find_towers, outermost


def plan_of_ends(model: nn.Module, named: Iterable[str]) -> dict[str, str]:
    """Return the rules for the embedding of tokens and for the head, which may be one matrix, that have none."""
    kinds = ((nn.Embedding, "embedding_rowwise"), (nn.Linear, "colwise_gather_output"))
    modules = dict(model.named_modules())
    ends = {
        name: (modules[name].weight, style)
        for name, (kind, style) in zip(find_names_of_ends(model), kinds, strict=True)
        if name is not None and isinstance(modules[name], kind)
    }
    known = [weight for name, (weight, _) in ends.items() if name in named]
    rules = {name: style for name, (weight, style) in ends.items() if not any(weight is other for other in known)}
    return {**_larger_tables(model, named), **rules}


def _larger_tables(model: nn.Module, named: Iterable[str]) -> dict[str, str]:
    """Return the rules for tables beside the embedding of tokens that hold more than it: vectors for each layer (Gemma
    3n and 4), or for groups of bytes (BLT).
    """
    first, _ = find_names_of_ends(model)
    tokens = model.get_submodule(first) if first else None
    if not isinstance(tokens, nn.Embedding):
        return {}
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    beside = [*find_blocks(model), *find_towers(model)]
    return {
        name: "embedding_colwise"
        for name, table in model.named_modules()
        if type(table) is type(tokens) and name not in named and outermost(beside, name) is None
        if table.weight.numel() > tokens.weight.numel() and places[id(table.weight)] == 1
        if not _is_read_by_its_holder(model, name)
    }


def _is_read_by_its_holder(model: nn.Module, name: str) -> bool:
    holder, _, short = name.rpartition(".")
    return reads_matrix_of(short, frozenset({type(model.get_submodule(holder))}))
