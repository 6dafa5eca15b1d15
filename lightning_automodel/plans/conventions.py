"""Finds rules for what a model's plan leaves out, by the names that attention and feed-forward have for their layers.

A model that publishes no plan gets all of it this way. In blocks of which a plan names a part (experts, and not the
attention beside them), modules get it in which it names nothing; other blocks, of towers, stay whole. What no names
tell is left to ``single_layers``.

Names alone are no proof. The shapes must fit each other, and the first forward pass runs each module that was split
with drawn weights, whole and in parts: one that computes across its features ends there, with its name. What completes
a published plan is compared family by family instead (docs/families.md).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.modules.forward import arguments_of
from lightning_automodel.modules.heads import BIASES_OF_HEADS, KEY_VALUE_HEADS, count_in_config, counts_of, heads_of
from lightning_automodel.modules.matrices import Matrix, in_features, out_features
from lightning_automodel.modules.reachable_code import attributes_of, codes_of_methods
from lightning_automodel.modules.structure import (
    class_names,
    find_blocks,
    heads_in,
    names_around,
    nearest_config,
    runs_outside_of_forward,
)
from lightning_automodel.plans.additions import WHOLE
from lightning_automodel.plans.pairs import LATENT, PAIRS, Pair

_OF_CHANNELS_OR_HEADS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ModuleList)
"""What computes with each feature as a channel, or with each head by a module of its own."""

_WIDTHS_OF_INPUT = {"embed_dim", "hidden_size"}
"""Variables in the code of attention modules for the width of what came in."""

_STREAMS = {"residual", "input_tensor"}
"""Arguments that are added to what a module computes."""


def conventional_plan(model: nn.Module, named: Iterable[str] = ()) -> dict[str, str]:
    """Collect the rules for the layers in the blocks of a model of transformers.

    Args:
        model: its parameters may be on the meta device.
        named: modules and parameters for which the model's own plan has rules: it is completed.

    Returns:
        name of a module or parameter to style, without wildcards; empty where no block has a pair, and for other
        libraries' models.
    """
    rules: dict[str, str] = {}
    named = set(named)
    around = names_around(named)
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, block in blocks_to_plan(model, named).items():
        width = getattr(nearest_config(model, name), "hidden_size", None)
        for inner, holder in block.named_modules():
            prefix = ".".join(part for part in (name, inner) if part)
            if prefix in around or _is_named(prefix, named):
                continue
            for found in _found_in(holder, width):
                if _is_called_from_outside(block, inner, found):
                    continue
                if any(places[id(table.weight)] > 1 for table in found.tables_of_heads().values()):
                    continue  # another module looks all heads up in it (UDOP)
                styles = {f"{prefix}.{layer}" if layer else prefix: style for layer, style in found.styles().items()}
                rules |= {} if rules.keys() & styles.keys() else styles
    return rules


def blocks_to_plan(model: nn.Module, named: Iterable[str]) -> dict[str, nn.Module]:
    """Return the blocks of a model of transformers that are split: those of the lists that its plan names, if any.

    Reformer's run outside of their forward pass, where nothing surrounds them.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    around = names_around(named)
    blocks = {name: block for name, block in find_blocks(model).items() if not runs_outside_of_forward(block)}
    return {name: block for name, block in blocks.items() if not around or name.rpartition(".")[0] in around}


def _is_named(name: str, named: set[str]) -> bool:
    """Tell whether a module or one around it is among those ``named``."""
    return name in named or not named.isdisjoint(names_around([name]))


def _is_called_from_outside(block: nn.Module, inner: str, found: "_Found") -> bool:
    """Tell whether what is around the holder ``inner`` calls the layers in it by itself (peft's adaption prompts)."""
    if not inner:
        return False
    outer, _, name = inner.rpartition(".")
    members = {layer.partition(".")[0] for layer in (*found.pair.columns, found.pair.row)}
    codes = codes_of_methods(type(block.get_submodule(outer)))
    return any(not members.isdisjoint(attributes_of({name}, code)) for code in codes)


# ---- a pair ----------------------------------------------------------------------------------------------------------


def _found_in(holder: nn.Module, width: int | None) -> Iterator["_Found"]:
    """Yield the pairs of which ``holder`` has all layers, that write a stream of ``width`` and can be split."""
    for found in filter(None, (_Found.of(holder, pair) for pair in PAIRS)):
        writes = width in (None, out_features(found.row))
        if writes and not found.is_kept() and found.style and not found.needs_all():
            yield found


@dataclass(frozen=True)
class _Found:
    """A pair in a module that holds all of its layers.

    Attributes:
        holder: that module.
        pair: the names in it.
        columns: the layers that read the stream.
        row: the layer that writes it.
    """

    holder: nn.Module
    pair: Pair
    columns: list[Matrix]
    row: Matrix

    @classmethod
    def of(cls, holder: nn.Module, pair: Pair) -> Self | None:
        """Find the layers of ``pair`` in ``holder``; ``None`` where one is missing, or no linear layer."""
        layers = [_member(holder, name) for name in (*pair.columns, pair.row)]
        linear = [layer for layer in layers if isinstance(layer, Matrix)]
        return cls(holder, pair, linear[:-1], linear[-1]) if len(linear) == len(layers) else None

    @property
    def reader(self) -> nn.Module:
        """Return the module whose code calls the layers that read the stream."""
        return self.holder.get_submodule(self.pair.columns[0].rpartition(".")[0])

    @property
    def writer(self) -> nn.Module:
        """Return the module whose code calls the layer that writes it."""
        return self.holder.get_submodule(self.pair.row.rpartition(".")[0])

    @property
    def style(self) -> str:
        """Tell from the widths how the layers that read the stream are split; empty where they do not fit the other.

        Keys and values may have fewer heads than queries. A single layer may hold several matrices: queries, keys and
        values that alternate head by head, or stand one above the other (in the lineage of GPT-2); or gate and up.
        """
        widths, read = [out_features(layer) for layer in self.columns], in_features(self.row)
        if self.pair.before:
            return "colwise" if self.heads and not any(width % self.heads for width in (*widths, read)) else ""
        if max(widths) == read:
            return "colwise"
        queries = "packed_qkv_colwise" if self.pair.is_stacked else "interleaved_colwise"
        fused = {3 * read: queries} if self.pair.is_attention else {2 * read: "packed_colwise"}
        if self.heads and self._groups() > 1 and not self.pair.is_stacked:
            fused[read + 2 * self._groups() * (read // self.heads)] = queries
        return fused.get(widths[0], "") if len(widths) == 1 else ""

    @property
    def heads(self) -> int | None:
        """Return the number of query heads, as far as the module that reads the stream tells it."""
        return heads_of(counts_of(self.reader)) or heads_in(self.reader, "q_proj")

    def _groups(self) -> int:
        """Count the groups of query heads, each of which stands before the key and the value that it reads."""
        counts = counts_of(self.reader) if self.pair.is_attention else {}
        return next((counts[key] for key in KEY_VALUE_HEADS if key in counts), 0)

    def styles(self) -> dict[str, str]:
        """Collect the style of each layer, and of the holder (the empty name) where that adds the stream."""
        adds = {"": "separate"} if self._adds_the_stream() else {}
        beside = {name: "embedding_of_heads" for name in self.tables_of_heads()}
        beside |= {name: "colwise" for name in self._numbers_of_heads()}
        beside |= {name: "mla_kv_a_proj" for name in self.pair.before if name == LATENT}
        prefix = self.pair.columns[0].rpartition(".")[0]
        beside = {f"{prefix}.{name}" if prefix else name: style for name, style in beside.items()}
        return {**adds, **beside, **dict.fromkeys(self.pair.columns, self.style), self.pair.row: "rowwise"}

    def tables_of_heads(self) -> dict[str, nn.Embedding]:
        """Find the tables with a number for each head, such as T5's biases of relative positions."""
        heads = heads_of(counts_of(self.reader)) if self.pair.is_attention else None
        tables = {name: child for name, child in own_children(self.reader).items() if isinstance(child, nn.Embedding)}
        return {name: table for name, table in tables.items() if table.embedding_dim == heads}

    def _numbers_of_heads(self) -> list[str]:
        """List the parameters of the reader itself that hold a number for each head, as sinks do."""
        own = self.reader.named_parameters(recurse=False) if self.pair.is_attention and self.heads else ()
        return [name for name, parameter in own if parameter.shape == (self.heads,)]

    def is_kept(self) -> bool:
        """Tell whether the class of the holder, or of what reads the stream, is one that is not split at all."""
        return bool(WHOLE & {*class_names(self.holder), *class_names(self.reader)})

    def needs_all(self) -> bool:
        """Tell whether what computes with the features between the layers needs all of them, as far as that is seen."""
        needs_all = self._has_others_beside() or self._writes_by_others()
        return needs_all or (self.pair.is_attention and self._counts_all_heads())

    def _has_others_beside(self) -> bool:
        """Tell whether what reads the stream has parameters for each head or feature, other matrices or convolutions.

        A norm that all heads share is none of these; a list of norms, one for each head, is.
        """
        known = (*self.columns, self.row, *self.tables_of_heads().values())
        others = [
            child for name, child in self.reader.named_children() if child not in known and name not in self.pair.before
        ]
        if any(isinstance(module, _OF_CHANNELS_OR_HEADS) for child in others for module in child.modules()):
            return True
        beside = [parameter for child in others for parameter in child.parameters(recurse=False)]
        divided = self._numbers_of_heads()
        own = any(p.ndim for name, p in self.reader.named_parameters(recurse=False) if name not in divided)
        sizes = {in_features(self.row), *self._sizes_of_numbers_of_heads()}
        return own or any(parameter.ndim > 1 or not sizes.isdisjoint(parameter.shape) for parameter in beside)

    def _sizes_of_numbers_of_heads(self) -> set[int]:
        """Return the number of heads, unless what all heads share is of the same size."""
        shared = getattr(self.reader, "head_dim", None)
        return {self.heads} if self.pair.is_attention and self.heads and self.heads != shared else set()

    def _writes_by_others(self) -> bool:
        """Tell whether the writer, where that is another module than the holder, has other matrices (adapters)."""
        matrices = [parameter for parameter in self.writer.parameters() if parameter.ndim > 1]
        return self.writer is not self.holder and len(matrices) > 1

    def _counts_all_heads(self) -> bool:
        """Tell whether attention is handed numbers of heads that it does not count, or returns the width that came in.

        That is ``reshape(batch, seq, embed_dim)`` with a variable; attributes are divided, and what others may read in
        the config is not.
        """
        variables = {name for code in codes_of_methods(type(self.reader)) for name in code.co_varnames}
        is_handed = BIASES_OF_HEADS.intersection(arguments_of(self.reader)) and heads_of(counts_of(self.reader)) is None
        return bool(is_handed or variables & _WIDTHS_OF_INPUT or count_in_config(self.reader))

    def _adds_the_stream(self) -> bool:
        is_block = isinstance(self.holder, GradientCheckpointingLayer)
        return not is_block and not _STREAMS.isdisjoint([*arguments_of(self.holder), *arguments_of(self.writer)])


def _member(holder: nn.Module, name: str) -> nn.Module | None:
    """Find a module by its name; peft's copies of a module lend it their members, which have other names."""
    found: nn.Module | None = holder
    for part in name.split("."):
        found = own_children(found).get(part) if found is not None else None
    return found
