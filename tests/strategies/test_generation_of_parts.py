"""Encoders and towers that ``generate`` calls by themselves, and unlike often on data ranks that share shards."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CsmConfig, CsmForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

from lightning_automodel import FSDP2Config
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.images import Inputs, find_inputs
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import Recorder, batches, make_trainer

WINDOW = 60


def tiny_whisper() -> nn.Module:
    """Reads windows of :data:`WINDOW` frames."""
    parts = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in parts.items()}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    others: dict[str, Any] = {"suppress_tokens": None, "begin_suppress_tokens": None, "init_std": 0.5}
    config = WhisperConfig(
        vocab_size=61, num_mel_bins=8, d_model=24, max_source_positions=WINDOW // 2, **sizes, **ids, **others
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    vars(model.generation_config).update(
        max_length=20,
        no_timestamps_token_id=49,
        is_multilingual=False,
        prev_sot_token_id=3,
        max_initial_timestamp_index=5,
    )
    return model


def answers(name: str, inputs: Inputs | None, model: Any, rank: int) -> list[list[int]]:
    """What a data rank asks: of a long recording or a short one, with images or without."""
    generator = torch.Generator().manual_seed(rank)
    if inputs is None:
        features = torch.randn(2, 8, WINDOW if rank else 5 * WINDOW // 2, generator=generator)
        asked = {"input_features": features, "attention_mask": torch.ones(2, features.shape[-1], dtype=torch.long)}
        return model.generate(**asked, return_timestamps=True, max_new_tokens=6, do_sample=False).tolist()
    asked = inputs.draw(generator, with_images=rank == 0)
    del asked["labels"]
    return model.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()


class Asked(Recorder):
    """Asks in training steps, as it asks a whole copy."""

    def __init__(self, name: str, inputs: Inputs | None) -> None:
        super().__init__()
        self.asks = name, inputs
        self.equal: list[bool] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_whisper() if self.asks[1] is None else tiny_model(self.asks[0])
            self.wholes = [tiny_whisper() if self.asks[1] is None else tiny_model(self.asks[0])]

    def loss(self, batch: list[Tensor]) -> Tensor:
        rank = self.trainer.strategy.data_rank  # type: ignore[attr-defined]
        for _ in range(2):
            found = answers(*self.asks, self.model, rank)
            self.equal.append(found == answers(*self.asks, self.wholes[0].train(), rank))
        return self.read(batch)

    def read(self, batch: list[Tensor]) -> Tensor:
        if self.asks[1] is None:
            return self.model(input_features=torch.ones(2, 8, WINDOW), labels=batch[0]).loss
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def asked(name: str, layout: str, inputs: Inputs | None, switches: Mapping[str, Any] = {}) -> list[bool]:
    """Runs on each rank."""
    module = Asked(name, inputs)
    make_trainer(LAYOUTS[layout].make(**switches), max_epochs=1, limit_train_batches=2).fit(module, batches(2))
    return module.equal


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2-dp2", "megatron3-dp2"])
def test_windows_are_as_many_as_a_recording_is_long(layout: str, pool2: Pool) -> None:
    assert pool2.run(asked, "whisper", layout, None, trainer=True) == [[True] * 4] * 2


@pytest.mark.slow
def test_images_are_on_one_data_rank_only(pool2: Pool) -> None:
    inputs = find_inputs(tiny_model("llava"))
    assert inputs.tokens
    assert pool2.run(asked, "llava", "fsdp2-dp2", inputs, trainer=True) == [[True] * 4] * 2


@pytest.mark.parametrize("layout", ["megatron3-dp2", "fsdp2-dp2"])
def test_towers_that_are_gathered_by_layers_want_images_on_all(layout: str, pool2: Pool) -> None:
    switches = {"config": FSDP2Config(tower_policy="per_layer")} if layout == "fsdp2-dp2" else {}
    with pytest.raises(RankFailed, match=r"1 of 2 data ranks encode images or sounds in generate of Llava"):
        pool2.run(asked, "llava", layout, find_inputs(tiny_model("llava")), switches, trainer=True)


def tiny_csm() -> nn.Module:
    """For each token of its own a second decoder generates two."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    codes: dict[str, Any] = {"num_codebooks": 3, "vocab_size": 32, "intermediate_size": 32, **heads}
    ids = dict(zip(("codebook_eos", "eos", "bos", "audio", "audio_eos"), range(1, 6), strict=True))
    codec = {"num_hidden_layers": 1, "num_filters": 2, "hidden_size": 16, "upsample_groups": 16, "codebook_size": 32}
    sizes = {"codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 3, "head_dim": 8}
    parts = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "upsampling_ratios": [2, 2]}
    config = CsmConfig(
        text_vocab_size=61,
        hidden_size=24,
        depth_decoder_config={**codes, "hidden_size": 16, "backbone_hidden_size": 24},
        codec_config={"model_type": "mimi", **codec, **sizes, **parts},
        **codes,
        **{f"{name}_token_id": value for name, value in ids.items()},
        pad_token_id=0,
        codebook_pad_token_id=0,
    )
    torch.manual_seed(0)
    return CsmForConditionalGeneration(config)


class Nested(Asked):
    """Lets the models that its own generates with say more on one data rank than on the other."""

    def configure_model(self) -> None:
        if self.model is None:
            made = [tiny_csm() if self.asks[0] == "csm" else tiny_model(self.asks[0]) for _ in range(2)]
            for parameter in (p for model in made for p in model.parameters() if p.ndim > 1):
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            self.model, self.wholes = made[0], made[1:]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        rank = self.trainer.strategy.data_rank  # type: ignore[attr-defined]
        found, expected = (self.answer(model, batch[0], 2 + 2 * rank) for model in (self.model, self.wholes[0]))
        self.equal.append(torch.equal(found, expected))

    def answer(self, model: Any, ids: Tensor, count: int) -> Tensor:
        inputs = self.asks[1]
        if inputs is None:
            return model.generate(ids, max_new_tokens=count, do_sample=False, depth_decoder_do_sample=False)
        asked = inputs.draw(torch.Generator().manual_seed(count), with_images=True)
        del asked["labels"]
        return model.generate(**asked, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)


def nested(name: str, layout: str, inputs: Inputs | None, switches: Mapping[str, Any] = {}) -> list[bool]:
    """Runs on each rank."""
    module = Nested(name, inputs)
    make_trainer(LAYOUTS[layout].make(**switches)).validate(module, batches(2, 6), verbose=False)
    return module.equal


NESTED = ["blip-2", "kosmos-2", "csm"]


@pytest.mark.parametrize("name", with_long(NESTED, "csm"))
def test_models_inside_generate_within_generate(name: str, pool2: Pool) -> None:
    inputs = None if name == "csm" else find_inputs(tiny_model(name))
    assert pool2.run(nested, name, "fsdp2-dp2", inputs, trainer=True) == [[True] * 2] * 2


def test_models_that_cannot_read_a_token_alone_end_together(pool2: Pool) -> None:
    inputs = find_inputs(tiny_model("idefics"))
    with pytest.raises(RankFailed, match=r"Idefics\w+ has ended on this data rank.*Exactly 1 of pixel_values"):
        pool2.run(nested, "idefics", "fsdp2-dp2", inputs, trainer=True)


SPLIT = {
    **{f"language_model.model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "language_model.model.decoder.layers.*.self_attn.out_proj": "rowwise",
}


def test_one_data_rank_reads_learned_queries_whole(pool2: Pool) -> None:
    inputs = find_inputs(tiny_model("blip-2"))
    plan = {"config": FSDP2Config(tp_plan=SPLIT)}
    assert pool2.run(nested, "blip-2", "fsdp2-tp2", inputs, plan, trainer=True) == [[True] * 3] * 2
