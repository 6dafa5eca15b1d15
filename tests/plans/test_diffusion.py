"""Video transformers of diffusers against one process: norms over all heads, attention with two outputs."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.structure import find_blocks, is_kept_in_float32
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, with_vectors
from tests.support.comparison import Batch, Schedule, compare

diffusers = pytest.importorskip("diffusers")

TEXT, FRAMES, SIDE = 7, 2, 4
SIZES: dict[str, Any] = dict(in_channels=3, out_channels=3, num_attention_heads=4, attention_head_dim=12, num_layers=2)
LAYOUTS = {2: {"tp": 2}, 4: {"dp_shard": 2, "tp": 2}}


class Denoiser(nn.Module):
    """A transformer with a loss on its outputs, as a LightningModule would have it."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        outputs = self.transformer(**inputs, return_dict=False)
        return SimpleNamespace(loss=sum((output - 0.5).square().mean() for output in outputs))


def wan(**changes: Any) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        **SIZES, text_dim=20, freq_dim=16, ffn_dim=64, rope_max_seq_len=32, **changes
    )


def hunyuan() -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        **SIZES,
        num_refiner_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=20,
        text_embed_2_dim=12,
        image_embed_dim=10,
        rope_axes_dim=(2, 4, 6),
    )


def ltx2(rope_type: str) -> nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        **SIZES,
        cross_attention_dim=48,
        audio_in_channels=3,
        audio_out_channels=3,
        audio_num_attention_heads=4,
        audio_attention_head_dim=6,
        audio_cross_attention_dim=24,
        caption_channels=20,
        rope_type=rope_type,
        gated_attn=True,
        audio_gated_attn=True,
        norm_elementwise_affine=True,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wan": wan,
    "wan with images": partial(wan, image_dim=10, added_kv_proj_dim=48),
    "hunyuan": hunyuan,
    "ltx2": partial(ltx2, "interleaved"),
    "ltx2 split": partial(ltx2, "split"),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Denoiser(with_vectors(MODELS[name]()))


def draw(name: str, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    batches = []
    for _ in range(schedule.micro_batches):
        noise = partial(torch.randn, generator=generator)
        video, text = noise(schedule.rows, 3, FRAMES, SIDE, SIDE), noise(schedule.rows, TEXT, 20)
        batch: dict[str, Any] = {"hidden_states": video, "encoder_hidden_states": text}
        batch["timestep"] = torch.rand(schedule.rows, generator=generator) * 1000
        if name == "wan with images":
            batch["encoder_hidden_states"] = noise(schedule.rows, 512, 20)
            batch["encoder_hidden_states_image"] = noise(schedule.rows, 5, 10)
        if name == "hunyuan":
            mask = torch.arange(TEXT)[None] < torch.tensor([[TEXT], [3]])
            batch |= {"encoder_attention_mask": mask.long(), "encoder_attention_mask_2": mask.long()}
            batch |= {"encoder_hidden_states_2": noise(schedule.rows, TEXT, 12)}
            batch |= {"image_embeds": noise(schedule.rows, 2, 10)}
        if name.startswith("ltx2"):
            tokens = FRAMES * SIDE * SIDE
            batch |= {
                "hidden_states": noise(schedule.rows, tokens, 3),
                "audio_hidden_states": noise(schedule.rows, 5, 3),
            }
            batch |= {"audio_encoder_hidden_states": text, "timestep": batch["timestep"][:, None].expand(-1, tokens)}
            batch |= {"audio_timestep": batch["timestep"][:, :1]}
            batch |= {"num_frames": FRAMES, "height": SIDE, "width": SIDE, "audio_num_frames": 5}
        batches.append(batch)
    return batches


def make_parallel(model: Denoiser, mesh: DeviceMesh) -> nn.Module:
    parallelize(model.transformer, mesh)
    return model


def errors(names: list[str], world: int) -> dict[str, tuple[float, str]]:
    """Runs on each rank: one call, because each imports diffusers."""
    schedule = Schedule(steps=1)
    return {
        name: compare(
            partial(build, name), LAYOUTS[world], world, schedule, make_parallel=make_parallel, draw=partial(draw, name)
        ).largest
        for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("names", [["ltx2"], pytest.param(list(MODELS), marks=pytest.mark.long)], ids=["one", "all"])
def test_models_equal_one_process(pool2: Pool, names: list[str]) -> None:
    for found in pool2.run(errors, names, 2):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def wan_in_bfloat16() -> tuple[float, set[str], list[int]]:
    """Runs on each rank: the loss, the parameters in float32, and the heads of each rank's attentions."""
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    model = build("wan")
    with pytest.raises(ValueError, match="sequence_parallel=True cuts the residual stream of transformers' models"):
        parallelize(model.transformer, mesh, FSDP2Config(sequence_parallel=True))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    parallelize(model.transformer, mesh, mp_policy=policy, param_dtype=torch.bfloat16)
    loss = model(**draw("wan", Schedule(), 0, 0)[0]).loss
    loss.backward()
    kept = {name for name, parameter in model.transformer.named_parameters() if parameter.dtype == torch.float32}
    return loss.item(), kept, [module.heads for module in model.modules() if hasattr(module, "heads")]


@pytest.mark.long
def test_data_parallelism_and_dtypes(pool4: Pool) -> None:
    for found in pool4.run(errors, ["wan"], 4):
        assert found["wan"][0] <= BOUND
    expected = build("wan")(**draw("wan", Schedule(), 0, 0)[0]).loss.item()
    for loss, kept, heads in pool4.run(wan_in_bfloat16):
        assert loss == pytest.approx(expected, rel=0.01)
        assert kept == {name for name, _ in wan().named_parameters() if is_kept_in_float32(wan(), name)}
        assert heads == [2] * 4


def test_blocks_are_the_layers() -> None:
    """Not the steps of the image embedder's feed-forward, which are a module list too."""
    assert list(find_blocks(MODELS["wan with images"]())) == ["blocks.0", "blocks.1"]
