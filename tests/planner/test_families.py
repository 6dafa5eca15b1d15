"""Families through the planner, on a CUDA device that is not there: none mixes devices."""

import pytest

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner.plan import build
from lightning_automodel.planner.play import Run, play, stage
from tests.support.families import causal_families, image_text_families, tiny_config
from tests.support.marks import with_long

FEW = ("gemma2", "qwen3_next", "olmoe", "dbrx")
"""Norms that cast back by ``type_as``, linear attention, experts that are counted by a histogram, or by a mask."""


STOPS = {
    "minimax": "it multiplies float32 by bfloat16 in this precision",
}


STOPS_OF_OTHERS = {
    "blip": "forward() wants pixel_values",
    "blip-2": "forward() wants pixel_values",
    "blt": "Expected parameter logits of distribution Categorical to satisfy a constraint, on tensors without values",
    "diffusion_gemma": "it returns no loss",
    "evolla": "plan knows models that write text, and those that read images as well",
    "fast_vlm": "TimmWrapperModel requires the timm library",
    "gemma3n": "TimmWrapperModel requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0: its tiny config is refused",
    "gemma4_unified_assistant": "The set of layer types producing a cache is different: its tiny config is refused",
    "git": "targets [46] do not fit to logits [2, 6, vocab]: its logits are of fewer tokens without an image",
    "idefics": "Exactly 1 of pixel_values, image_encoder_embeddings or perceiver_embeddings has to be not-None",
    "inkling_mm_model": "No module named 'scipy'",
    "instructblip": "forward() wants pixel_values and qformer_input_ids",
    "instructblipvideo": "forward() wants pixel_values and qformer_input_ids",
    "jetmoe": "split_with_sizes expects split_sizes to sum exactly: it counts tokens of experts, without values",
    "kosmos-2": "You have to specify either `pixel_values` or `image_embeds`",
    "molmo2": "`mm_token_type_ids` is required as a model input when training",
    "musicgen": "its config has no attribute dropout",
    "musicgen_melody": "its config has no attribute dropout",
    "openai-gpt": "expected scalar type torch.float32 but found torch.bfloat16",
    "perception_lm": "TimmWrapperModel requires the timm library",
    "pi0": "forward() wants state",
    "pix2struct": "You have to specify flattened_patches",
    "pp_formulanet": "You must specify exactly one of encoder_outputs or pixel_values",
    "udop": "Bbox is required",
    "vision-encoder-decoder": "You have to specify pixel_values",
    "xlm": "Cannot access accelerator device when none is available",
    "xlstm": "expected scalar type torch.float32 but found torch.bfloat16",
}
"""Families without a plan, or with images, that stop for another reason than two devices, in their own words."""

FEW_OTHERS = ("diffllama", "opt", "aya_vision")
"""A parameter that the constructor draws on the host, biases and learned positions, a tower for images."""

OTHERS = [
    family for family in (*causal_families(with_plan=False), *image_text_families()) if family not in STOPS_OF_OTHERS
]


def check(family: str, tp: int = 2) -> None:
    config = FSDP2Config(sequence_parallel=tp > 1)
    run = Run(sizes=resolve_sizes(4 * tp, tp=tp), config=config, sequence_length=24, micro_batch=2)
    model = build(tiny_config(family))
    with stage(run) as mesh:
        watched = play(model, run, mesh)
    assert watched.flops["backward"] > 0
    assert watched.peaks["backward"]["activations"] >= 0
    assert any(key.axis == "tp" for key in watched.volume) == (tp > 1)


@pytest.mark.parametrize("family", FEW)
def test_few_families(family: str) -> None:
    check(family)


def test_attention_on_rows_gives_what_its_caller_may_view() -> None:
    """Heads that travelled lie one after another; the functions of transformers lay them beside each other."""
    config = FSDP2Config(cp_exchange="all_to_all")
    run = Run(sizes=resolve_sizes(4, cp=2), config=config, sequence_length=24, micro_batch=2)
    with stage(run) as mesh:
        assert play(build(tiny_config("afmoe")), run, mesh).flops["backward"] > 0


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in causal_families() if family not in STOPS])
def test_every_family_with_a_plan(family: str) -> None:
    check(family)


@pytest.mark.long
@pytest.mark.parametrize("family", STOPS)
def test_families_that_stop(family: str) -> None:
    with pytest.raises(RuntimeError):
        check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", with_long(OTHERS, *(set(OTHERS) - set(FEW_OTHERS))))
def test_families_without_a_plan_and_with_images(family: str) -> None:
    check(family, tp=1)
