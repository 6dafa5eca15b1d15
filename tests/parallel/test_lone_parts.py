"""An encoder that is called by itself, by ``generate`` or by hand, gathers what it needs as the whole model does."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.training import whole

BOUND = 1e-4
PLAN = {
    "model.encoder.layers.*.fc1": "colwise",
    "model.encoder.layers.*.fc2": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
}
IDS, LABELS = torch.arange(3, 13).view(2, 5), torch.arange(20, 28).view(2, 4)


def tiny_bart() -> BartForConditionalGeneration:
    """Encoder and decoder of two layers, the same on every rank, whose tokens are not all one."""
    sizes = {
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))
    }
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    torch.manual_seed(0)
    config = BartConfig(
        d_model=24, vocab_size=61, max_position_embeddings=32, dropout=0.0, init_std=0.5, **sizes, **heads
    )
    return BartForConditionalGeneration(config)


def passes(model: nn.Module) -> dict[str, Any]:
    """What it generates before any other pass, and gradients of a loss that reads the encoder's output, too."""
    model.eval()
    beams = model.generate(IDS, max_new_tokens=5, num_beams=2)
    encoded = model.get_encoder()(input_ids=IDS)
    loss = model(encoder_outputs=encoded, labels=LABELS).loss + encoded.last_hidden_state.square().mean()
    loss.backward()
    greedy = model.generate(IDS, max_new_tokens=5)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"tokens": [beams, greedy], "loss": loss.detach(), "gradients": gradients}


def both(sizes: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs on each rank."""
    one = tiny_bart()
    config = FSDP2Config(tp_plan=PLAN) if "tp" in sizes else FSDP2Config()
    many = parallelize(copy.deepcopy(one), build_mesh(resolve_sizes(2, **sizes), "cpu"), config)
    return passes(one), passes(many)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids="-".join)
def test_it_is_that_of_one_process(sizes: dict[str, int], pool2: Pool) -> None:
    for one, many in pool2.run(both, sizes):
        for expected, found in zip(one["tokens"], many["tokens"], strict=True):
            assert len(expected.unique()) > 2
            assert expected.equal(found)
        assert (many["loss"] - one["loss"]).abs() < BOUND
        assert one["gradients"].keys() == many["gradients"].keys()
        norm = torch.stack([gradient.norm() for gradient in one["gradients"].values()]).norm()
        for name, gradient in one["gradients"].items():
            assert (many["gradients"][name] - gradient).norm() <= BOUND * max(gradient.norm(), 0.01 * norm), name
