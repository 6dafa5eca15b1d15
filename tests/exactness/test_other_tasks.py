"""Models of transformers that write no text: they classify images and sounds, and segment."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    AutoformerConfig,
    AutoformerForPrediction,
    BeitConfig,
    BeitForImageClassification,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    Data2VecVisionConfig,
    Data2VecVisionForImageClassification,
    FNetConfig,
    FNetForMaskedLM,
    PreTrainedConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Batch, Schedule, compare

BOUND = 1e-4
SCHEDULE = Schedule(steps=2, learning_rate=0.02)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": 128, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
PATCHES: dict[str, Any] = {"image_size": 56, "patch_size": 14}
CONFIGS: dict[type[nn.Module], PreTrainedConfig] = {
    BeitForImageClassification: BeitConfig(**SIZES, **DRY, **PATCHES),
    ASTForAudioClassification: ASTConfig(
        **SIZES,
        **DRY,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=64,
        num_mel_bins=16,
    ),
    SegformerForSemanticSegmentation: SegformerConfig(
        **DRY,
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        classifier_dropout_prob=0.0,
    ),
    FNetForMaskedLM: FNetConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=128,
        hidden_dropout_prob=0.0,
        max_position_embeddings=32,
    ),
    CLIPSegForImageSegmentation: CLIPSegConfig(
        text_config=TEXT,
        vision_config={**SIZES, **PATCHES},
        projection_dim=16,
        reduce_dim=16,
        extract_layers=[0, 1],
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    ),
}
BIASED: dict[str, tuple[type[nn.Module], PreTrainedConfig]] = {
    name: (model, config(**SIZES, **DRY, **PATCHES, **{field: True}))
    for name, model, config, field in (
        ("beit, of each block", BeitForImageClassification, BeitConfig, "use_relative_position_bias"),
        ("beit, shared", BeitForImageClassification, BeitConfig, "use_shared_relative_position_bias"),
        (
            "data2vec, shared",
            Data2VecVisionForImageClassification,
            Data2VecVisionConfig,
            "use_shared_relative_position_bias",
        ),
    )
}
"""Models whose attention is handed biases of positions for each head."""
SWIN: dict[str, Any] = {"image_size": 56, "patch_size": 2, "embed_dim": 16, "window_size": 7}
SWIN |= {**DRY, "depths": [1, 1], "num_heads": [2, 4], "out_features": ["stage1", "stage2"]}
UPERNET = UperNetConfig(
    backbone_config=SwinConfig(**SWIN), hidden_size=24, pool_scales=[1, 2], use_auxiliary_head=False
)
LAYERS: dict[str, Any] = {
    f"{part}_{kind}": value
    for part in ("encoder", "decoder")
    for kind, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 32, "layerdrop": 0.0}.items()
}
AUTOFORMER = AutoformerConfig(
    prediction_length=4,
    context_length=8,
    lags_sequence=[1, 2],
    num_time_features=2,
    d_model=16,
    moving_average=3,
    label_length=4,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    **LAYERS,
)
SPLIT = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}
PLAN = {
    **{f"decoder.layers.*.self_attn.{name}": style for name, style in SPLIT.items()},
    "decoder.layers.*.mlp.fc1": "colwise",
    "decoder.layers.*.mlp.fc2": "rowwise",
}


def build(kind: type[nn.Module], config: PreTrainedConfig | None = None) -> nn.Module:
    """Draw a model of which no vector is zero, and no table."""
    torch.manual_seed(0)
    model = kind(config or CONFIGS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def draw(kind: type[nn.Module], schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Draw what a model of ``kind`` reads."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    return [_batch(kind, schedule.rows, generator) for _ in range(schedule.micro_batches)]


def _batch(kind: type[nn.Module], rows: int, generator: torch.Generator) -> Batch:
    def ids(*shape: int) -> Tensor:
        return torch.randint(3, 128, shape, generator=generator)

    side = 64 if kind is SegformerForSemanticSegmentation else 56
    pixels = torch.randn(rows, 3, side, side, generator=generator)
    classes = torch.randint(0, 2, (rows,), generator=generator)
    read: dict[type[nn.Module], Batch] = {
        BeitForImageClassification: {"pixel_values": pixels, "labels": classes},
        Data2VecVisionForImageClassification: {"pixel_values": pixels, "labels": classes},
        ASTForAudioClassification: {"input_values": torch.randn(rows, 64, 16, generator=generator), "labels": classes},
        SegformerForSemanticSegmentation: {"pixel_values": pixels, "labels": ids(rows, side, side) % 2},
        FNetForMaskedLM: dict.fromkeys(("input_ids", "labels"), ids(rows, 16)),
        CLIPSegForImageSegmentation: {
            "input_ids": ids(rows, 12),
            "pixel_values": pixels,
            "labels": (pixels[:, 0] > 0).float(),
        },
        AutoformerForPrediction: {
            "past_values": torch.randn(rows, 10, generator=generator),
            "past_time_features": torch.randn(rows, 10, 2, generator=generator),
            "past_observed_mask": torch.ones(rows, 10),
            "future_values": torch.randn(rows, 4, generator=generator),
            "future_time_features": torch.randn(rows, 4, 2, generator=generator),
        },
        UperNetForSemanticSegmentation: {"pixel_values": pixels, "labels": ids(rows, side, side) % 2},
    }
    return read[kind]


def error(
    kind: type[nn.Module], sizes: dict[str, int], config: FSDP2Config, of: PreTrainedConfig | None = None
) -> tuple[float, str]:
    """Runs on each rank."""
    draws: Callable[..., list[Batch]] = lambda *arguments: draw(kind, *arguments)  # noqa: E731
    return compare(lambda: build(kind, of), sizes, dist.get_world_size(), SCHEDULE, config, draw=draws).largest


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_a_sequence_that_is_cut(kind: type[nn.Module], pool2: Pool) -> None:
    """Pooled behind the last block, mixed by code without attention, seen as an image between blocks."""
    for largest, name in pool2.run(error, kind, {"cp": 2}, FSDP2Config()):
        assert largest <= BOUND, name


def test_a_stream_that_is_added_to_between_blocks(pool2: Pool) -> None:
    config = FSDP2Config(tp_plan=PLAN, sequence_parallel=True)
    for largest, name in pool2.run(error, CLIPSegForImageSegmentation, {"tp": 2}, config):
        assert largest <= BOUND, name


@pytest.mark.parametrize("name", BIASED)
def test_biases_of_heads_that_images_have(name: str, pool2: Pool) -> None:
    kind, of = BIASED[name]
    for largest, parameter in pool2.run(error, kind, {"tp": 2}, FSDP2Config(), of):
        assert largest <= BOUND, parameter


def test_blocks_of_a_backbone_have_its_width(pool2: Pool) -> None:
    """A block of Swin adds its own stream, which is of another width than the model around it names."""
    for largest, parameter in pool2.run(error, UperNetForSemanticSegmentation, {"tp": 2}, FSDP2Config(), UPERNET):
        assert largest <= BOUND, parameter


def test_attention_that_looks_at_all_heads_at_once_stays_whole(pool2: Pool) -> None:
    """Auto-correlation finds its delays by a mean over heads."""
    for largest, parameter in pool2.run(error, AutoformerForPrediction, {"tp": 2}, FSDP2Config(), AUTOFORMER):
        assert largest <= BOUND, parameter
