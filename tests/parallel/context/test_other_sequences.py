"""What a block attends to beside its stream (an encoder's states) is no rows of it, however long it is."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool

LENGTH, WIDTH = 24, 32
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def errors(length: int, sizes: dict[str, int], config: FSDP2Config) -> tuple[float, float]:
    """Runs on each rank: of the loss, and of the gradient of states that another model gave."""
    torch.manual_seed(0)
    shape = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": 128}
    one = GPT2LMHeadModel(GPT2Config(**shape, **DRY, add_cross_attention=True, use_cache=False)).train()
    mesh = build_mesh(resolve_sizes(torch.distributed.get_world_size(), **sizes), "cpu")
    many = parallelize(copy.deepcopy(one), mesh, config).train()
    ids = torch.randint(3, 100, (2, LENGTH))
    states = torch.randn(2, length, WIDTH)
    mask = (torch.arange(length) < torch.tensor([[length // 2], [length]])).long()

    def step(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        given = states.clone().requires_grad_()
        loss = model(
            input_ids=ids, labels=ids, encoder_hidden_states=given, encoder_attention_mask=mask, use_cache=False
        ).loss
        loss.backward()
        assert given.grad is not None
        return loss.detach(), given.grad

    (expected, expected_grad), (found, found_grad) = step(one), step(many)
    return float((found - expected).abs()), float((found_grad - expected_grad).norm() / expected_grad.norm())


@pytest.mark.parametrize("length", [LENGTH // 2, LENGTH])
@pytest.mark.parametrize("config", [FSDP2Config(), FSDP2Config(activation_checkpointing=True)], ids=["plain", "ac"])
def test_states_of_an_encoder(length: int, config: FSDP2Config, pool2: Pool) -> None:
    for loss, gradient in pool2.run(errors, length, {"cp": 2}, config):
        assert loss < 1e-5
        assert gradient < 1e-5


@pytest.mark.long
def test_states_of_an_encoder_beside_tensor_parallelism(pool4: Pool) -> None:
    for loss, gradient in pool4.run(errors, LENGTH // 2, {"cp": 2, "tp": 2}, FSDP2Config()):
        assert loss < 1e-5
        assert gradient < 1e-5
