"""Models around those that run blocks, whose head is elsewhere or nowhere: what they return is whole under cp."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaModel, PreTrainedModel, T5Config, T5EncoderModel

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_config, tiny_model
from tests.support.training import whole

BOUND = 5e-5


class Wrapper(PreTrainedModel):
    """A model of a user's around one with a head."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.post_init()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def make_encoder() -> nn.Module:
    return T5EncoderModel(T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=2, vocab_size=128))


def make_llava() -> nn.Module:
    config: Any = tiny_config("llava")
    return LlavaModel(config)


def make_wrapper() -> nn.Module:
    return Wrapper(tiny_model("llama"))


def largest_error(make: Callable[[], nn.Module]) -> float:
    """Runs on each rank: of gradients of a loss that reads what the model returns, as pooling does, without labels."""
    torch.manual_seed(0)
    reference = make().eval()
    ids = torch.randint(3, 100, (2, 14), generator=torch.Generator().manual_seed(0))
    model = parallelize(copy.deepcopy(reference), build_mesh(resolve_sizes(2, cp=2), "cpu")).eval()
    gradients: list[dict[str, Tensor]] = []
    for one in (reference, model):
        returned = one(input_ids=ids)[0]
        assert returned.shape[1] == 14
        functional.normalize(returned.cumsum(1), dim=-1)[..., 0].square().sum().backward()
        gradients.append({n: whole(p.grad) for n, p in one.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    return max(float((gradients[1][n] - g).norm() / g.norm().clamp(min=1e-6)) for n, g in gradients[0].items())


@pytest.mark.parametrize("make", [make_encoder, make_llava, make_wrapper])
def test_what_leaves_is_whole(make: Callable[[], nn.Module], pool2: Pool) -> None:
    assert max(pool2.run(largest_error, make)) < BOUND
