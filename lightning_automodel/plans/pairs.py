"""The names that models of transformers have for the layers of attention and feed-forward, by which they are split.

::

    BertLayer
      attention
        self.query, self.key, self.value     [out, in]     read the stream         -> colwise
        output.dense                         [out, in]     reads their features    -> rowwise
      intermediate.dense                                                           -> colwise
      output.dense                                                                 -> rowwise
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Layers that read the stream, and the one that reads their features, by their names in a module that holds them.

    Attributes:
        columns: layers that read the stream.
        row: the layer that writes it.
        is_attention: the features between are those of heads.
        is_stacked: queries, keys and values stand one above the other, in a single layer.
        before: layers that stay whole between the stream and ``columns``, whose features are those of all heads.
    """

    columns: tuple[str, ...]
    row: str
    is_attention: bool = False
    is_stacked: bool = False
    before: tuple[str, ...] = ()


def _attention(columns: str, *rows: str, is_stacked: bool = False) -> list[Pair]:
    return [Pair(tuple(columns.split()), row, is_attention=True, is_stacked=is_stacked) for row in rows]


def _latent_attention(columns: str, row: str) -> Pair:
    """Return the pair of attention (of DeepSeek-V2) whose heads read latent vectors that they share."""
    before = ("q_a_proj", "q_a_layernorm", LATENT, "kv_a_layernorm")
    return Pair(tuple(columns.split()), row, is_attention=True, before=before)


def _feed_forward(columns: str, row: str) -> Pair:
    return Pair(tuple(columns.split()), row)


LATENT = "kv_a_proj_with_mqa"
"""The layer whose features are a latent vector, and the rotary part of the keys of all heads."""

PAIRS = (
    *_attention("q_proj k_proj v_proj gate_proj", "o_proj"),
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
    *_attention("Wqkv", "out_proj", "Wo", is_stacked=True),
    _latent_attention("q_b_proj kv_b_proj", "o_proj"),
    _latent_attention("q_proj kv_b_proj", "o_proj"),
    _feed_forward("gate_proj up_proj", "down_proj"),
    _feed_forward("gate_up_proj", "down_proj"),
    _feed_forward("input_linear", "output_linear"),
    _feed_forward("wi_0 wi_1", "wo"),
    _feed_forward("w1 w3", "w2"),
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
