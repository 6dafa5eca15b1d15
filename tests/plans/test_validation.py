"""Sizes that do not fit a model, before anything is split: the arithmetic, and the sizes that do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_automodel.distributed import logs
from lightning_automodel.parallelizer import validate_tp_mesh, validate_tp_mesh_for_nemotron_nas
from tests.support.families import tiny_model


def axis_of(size: int) -> Any:
    """What the checks read of a mesh."""
    return SimpleNamespace(size=lambda: size)


def on_meta(family: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return tiny_model(family, **changes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sizes_that_fit(tp: int) -> None:
    validate_tp_mesh(tiny_model("llama", num_attention_heads=8), axis_of(tp))


def test_heads_that_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    told = r"tp=3 does not divide num_attention_heads=4 and num_key_value_heads=2 of model.layers.\*.self_attn: "
    with pytest.warns(UserWarning, match=told):
        validate_tp_mesh(tiny_model("llama"), axis_of(3))
    with pytest.warns(UserWarning, match=r"tp=2 does not divide num_key_value_heads=3 of .* are the same$"):
        validate_tp_mesh(tiny_model("llama", num_attention_heads=12, num_key_value_heads=3), axis_of(2))


def test_packed_matrices_are_divided_one_by_one() -> None:
    model = tiny_model("mixtral", intermediate_size=66)
    validate_tp_mesh(model, axis_of(2))
    with pytest.raises(
        ValueError, match=r"each of the 2 matrices in .*experts.gate_up_proj=66.*use one of 1, 2, 6, 22, 66$"
    ):
        validate_tp_mesh(model, axis_of(4))


def test_plain_feed_forward_and_vocabulary_may_be_uneven() -> None:
    validate_tp_mesh(tiny_model("llama", intermediate_size=65, vocab_size=131), axis_of(2))


@pytest.mark.parametrize("as_dict", [True, False])
def test_nemotron_nas(as_dict: bool) -> None:
    groups = [1, 4, None, 2]
    blocks: list[Any] = [{"attention": {"n_heads_in_group": group, "no_op": group is None}} for group in groups]
    if not as_dict:
        blocks = [SimpleNamespace(attention=SimpleNamespace(**block["attention"])) for block in blocks]
    model = nn.Module()
    model.config = SimpleNamespace(num_attention_heads=24, block_configs=blocks)  # type: ignore[assignment]
    validate_tp_mesh_for_nemotron_nas(model, 12)
    with pytest.raises(ValueError, match=r"block_configs\[1\].*n_heads_in_group=6: .*use one of 1, 2, 3, 6, 12, 24$"):
        validate_tp_mesh_for_nemotron_nas(model, 4)
    with pytest.raises(ValueError, match="tp=5 does not fit Module with num_attention_heads=24"):
        validate_tp_mesh(model, axis_of(5))
