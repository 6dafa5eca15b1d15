"""Finds the plan of a model that publishes none, by the names that attention and feed-forward have for their layers.

::

    BertLayer
      attention
        self.query, self.key, self.value     [out, in]     read the stream         -> colwise
        output.dense                         [out, in]     reads their features    -> rowwise
      intermediate.dense                                                           -> colwise
      output.dense                                                                 -> rowwise

Names alone are no proof. The shapes must fit each other, and the first forward pass runs each module that was split
with drawn weights, whole and in parts: one that computes across its features ends there, with its name.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.modules.forward import arguments_of
from lightning_automodel.modules.heads import BIASES_OF_HEADS, counts_of, heads_of
from lightning_automodel.modules.matrices import Matrix, in_features, out_features
from lightning_automodel.modules.reachable_code import codes_of_methods
from lightning_automodel.modules.structure import class_names, find_blocks, find_names_of_ends, nearest_config
from lightning_automodel.plans.additions import WHOLE


@dataclass(frozen=True)
class Pair:
    """Layers that read the stream, and the one that reads their features, by their names in a module that holds them.

    Attributes:
        columns: layers that read the stream.
        row: the layer that writes it.
        is_attention: the features between are those of heads.
        is_stacked: queries, keys and values stand one above the other, in a single layer.
    """

    columns: tuple[str, ...]
    row: str
    is_attention: bool = False
    is_stacked: bool = False


def _attention(columns: str, *rows: str, is_stacked: bool = False) -> list[Pair]:
    return [Pair(tuple(columns.split()), row, is_attention=True, is_stacked=is_stacked) for row in rows]


def _feed_forward(columns: str, row: str) -> Pair:
    return Pair(tuple(columns.split()), row)


PAIRS = (
    *_attention("q_proj k_proj v_proj", "out_proj", "o_proj", "dense", "Wo"),
    *_attention("query_proj key_proj value_proj", "out_proj"),
    *_attention("self.query self.key self.value", "output.dense"),
    *_attention("attention.query attention.key attention.value", "output.dense"),
    *_attention("query key value", "output.dense", "dense", "output"),
    *_attention("q k v", "o"),
    *_attention("q_lin k_lin v_lin", "out_lin"),
    *_attention("Wq Wk Wv", "dense"),
    *_attention("project_q project_k project_v", "attention_out"),
    *_attention("query_key_value", "dense"),
    *_attention("c_attn", "c_proj", is_stacked=True),
    *_attention("Wqkv", "out_proj", is_stacked=True),
    _feed_forward("gate_proj up_proj", "down_proj"),
    _feed_forward("wi_0 wi_1", "wo"),
    _feed_forward("w_in.w_0 w_in.w_1", "w_out"),
    _feed_forward("intermediate.dense", "output.dense"),
    _feed_forward("intermediate_dense", "output_dense"),
    _feed_forward("intermediate", "output"),
    _feed_forward("dense_h_to_4h", "dense_4h_to_h"),
    _feed_forward("up_proj", "down_proj"),
    _feed_forward("fc1", "fc2"),
    _feed_forward("fc_in", "fc_out"),
    _feed_forward("c_fc", "c_proj"),
    _feed_forward("lin1", "lin2"),
    _feed_forward("linear1", "linear2"),
    _feed_forward("layer_1", "layer_2"),
    _feed_forward("wi", "wo"),
    _feed_forward("Wi", "Wo"),
    _feed_forward("ffn", "ffn_output"),
)
"""In transformers' models. Of two that share a layer the earlier one counts."""

_TABLE = "embedding_of_heads"
_OF_CHANNELS_OR_HEADS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ModuleList)
"""What computes with each feature as a channel, or with each head by a module of its own."""

_WIDTHS_OF_INPUT = {"embed_dim", "hidden_size"}
"""Variables in the code of attention modules for the width of what came in."""

_STREAMS = {"residual", "input_tensor"}
"""Arguments that are added to what a module computes."""


def conventional_plan(model: nn.Module) -> dict[str, str]:
    """Collect the rules for the layers in the blocks of a model of transformers, and for its ends.

    Args:
        model: its parameters may be on the meta device.

    Returns:
        name of a module to style, without wildcards; empty where no block has a pair, and for other libraries' models.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    pairs: dict[str, dict[str, str]] = {}
    for name, block in find_blocks(model).items():
        width = getattr(nearest_config(model, name), "hidden_size", None)
        for inner, holder in block.named_modules():
            for found in _found_in(holder, width):
                prefix = ".".join(part for part in (name, inner) if part)
                styles = {f"{prefix}.{layer}" if layer else prefix: style for layer, style in found.styles().items()}
                pairs |= {} if pairs.keys() & styles.keys() else dict.fromkeys(styles, styles)
    rules = {name: styles[name] for name, styles in pairs.items() if not _reads_a_shared_table(model, styles, pairs)}
    return {**_ends(model), **rules} if rules else {}


def _reads_a_shared_table(model: nn.Module, styles: Mapping[str, str], others: Collection[str]) -> bool:
    """Tell whether a pair has a table of heads that a module beside all pairs reads, too, which needs all heads."""
    tables = {id(model.get_parameter(f"{name}.weight")) for name, style in styles.items() if style == _TABLE}
    held = model.named_parameters(remove_duplicate=False) if tables else ()
    return any(id(p) in tables and name.rpartition(".")[0] not in others for name, p in held)


def _ends(model: nn.Module) -> dict[str, str]:
    """Return the rules for the embedding of tokens and for the head, which may be one matrix."""
    embedding, head = find_names_of_ends(model)
    rules = {}
    if embedding is not None and isinstance(model.get_submodule(embedding), nn.Embedding):
        rules[embedding] = "embedding_rowwise"
    if head is not None and isinstance(model.get_submodule(head), nn.Linear):
        rules[head] = "colwise_gather_output"
    return rules


# ---- a pair ----------------------------------------------------------------------------------------------------------


def _found_in(holder: nn.Module, width: int | None) -> Iterator["_Found"]:
    """Yield the pairs of which ``holder`` has all layers, that write a stream of ``width``, and that can be split."""
    for pair in PAIRS:
        found = _Found.of(holder, pair)
        if found is not None and found.style and width in (None, out_features(found.row)) and not found.stays_whole():
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
        if max(widths) == read:
            return "colwise"
        queries = "packed_qkv_colwise" if self.pair.is_stacked else "interleaved_colwise"
        fused = {3 * read: queries} if self.pair.is_attention else {2 * read: "packed_colwise"}
        return fused.get(widths[0], "") if len(widths) == 1 else ""

    def styles(self) -> dict[str, str]:
        """Collect the style of each layer, and of the holder (the empty name) where that adds the stream."""
        adds = {"": "separate"} if self._adds_the_stream() else {}
        prefix = self.pair.columns[0].rpartition(".")[0]
        tables = {f"{prefix}.{name}" if prefix else name: _TABLE for name in self._tables_of_heads()}
        return {**adds, **tables, **dict.fromkeys(self.pair.columns, self.style), self.pair.row: "rowwise"}

    def _tables_of_heads(self) -> dict[str, nn.Embedding]:
        """Find the tables with a number for each head, such as T5's biases of relative positions."""
        heads = heads_of(counts_of(self.reader)) if self.pair.is_attention else None
        tables = {name: child for name, child in own_children(self.reader).items() if isinstance(child, nn.Embedding)}
        return {name: table for name, table in tables.items() if table.embedding_dim == heads}

    def stays_whole(self) -> bool:
        """Tell whether what computes with the features between the layers needs all of them, as far as that is seen."""
        names = {*class_names(self.holder), *class_names(self.reader)}
        needs_all = bool(WHOLE & names) or self._has_others_beside() or self._writes_by_others()
        return needs_all or (self.pair.is_attention and self._counts_all_heads())

    def _has_others_beside(self) -> bool:
        """Tell whether what reads the stream has parameters for each head or feature, other matrices or convolutions.

        A norm that all heads share is none of these; a list of norms, one for each head, is.
        """
        split = (*self.columns, self.row, *self._tables_of_heads().values())
        others = [child for child in self.reader.children() if child not in split]
        if any(isinstance(module, _OF_CHANNELS_OR_HEADS) for child in others for module in child.modules()):
            return True
        beside = [parameter for child in others for parameter in child.parameters(recurse=False)]
        own = any(parameter.ndim for parameter in self.reader.parameters(recurse=False))
        return own or any(parameter.ndim > 1 or in_features(self.row) in parameter.shape for parameter in beside)

    def _writes_by_others(self) -> bool:
        """Tell whether the writer, where that is another module than the holder, has other matrices (adapters)."""
        matrices = [parameter for parameter in self.writer.parameters() if parameter.ndim > 1]
        return self.writer is not self.holder and len(matrices) > 1

    def _counts_all_heads(self) -> bool:
        """Tell whether attention is handed numbers of heads that it does not count, or returns the width that came in.

        That is ``reshape(batch, seq, embed_dim)`` with a variable; attributes are divided.
        """
        variables = {name for code in codes_of_methods(type(self.reader)) for name in code.co_varnames}
        is_handed = BIASES_OF_HEADS.intersection(arguments_of(self.reader)) and heads_of(counts_of(self.reader)) is None
        return bool(is_handed or variables & _WIDTHS_OF_INPUT)

    def _adds_the_stream(self) -> bool:
        is_block = isinstance(self.holder, GradientCheckpointingLayer)
        return not is_block and not _STREAMS.isdisjoint([*arguments_of(self.holder), *arguments_of(self.writer)])


def _member(holder: nn.Module, name: str) -> nn.Module | None:
    """Find a module by its name; peft's copies of a module lend it their members, which have other names."""
    found: nn.Module | None = holder
    for part in name.split("."):
        found = own_children(found).get(part) if found is not None else None
    return found
