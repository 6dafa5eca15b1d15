"""Which config of a model says how wide its layers are."""

import torch
from transformers import (
    EncodecConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)

from lightning_automodel.modules.structure import text_config


def test_of_two_that_know_text_the_one_that_writes() -> None:
    """MusicGen reads text by one model and writes codes by another; transformers does not choose."""
    config = MusicgenConfig(
        text_encoder=T5Config(num_layers=1),
        audio_encoder=EncodecConfig(),
        decoder=MusicgenDecoderConfig(num_hidden_layers=1),
    )
    with torch.device("meta"):
        model = MusicgenForConditionalGeneration(config)
    assert text_config(model).model_type == "musicgen_decoder"
