"""Models of families without their language head, as embeddings and classifiers use them, split over tp and cp."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_config
from tests.support.marks import with_long
from tests.support.training import whole

BOUND = 1e-4
KINDS: list[tuple[Any, str]] = [
    (AutoModel, "doge"),
    (AutoModelForSequenceClassification, "doge"),
    (AutoModel, "embedding_gemma2_text"),
    (AutoModel, "higgs_audio_v2"),
    (AutoModelForSequenceClassification, "qwen3_moe"),
]
SIZES: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "config": FSDP2Config(sequence_parallel=True)}, {"cp": 2}]
ALL = [(kind, family, sizes) for kind, family in KINDS for sizes in SIZES]
FAST = [case for case in ALL if case[2] is SIZES[1]]


def build(kind: Any, family: str) -> nn.Module:
    config = tiny_config(family)
    config.use_cache = config.get_text_config(decoder=True).use_cache = False
    config.pad_token_id = config.get_text_config(decoder=True).pad_token_id = 0
    torch.manual_seed(0)
    return kind.from_config(config).eval()


def largest_error(kind: Any, family: str, sizes: dict[str, Any]) -> tuple[float, str]:
    """Runs on each rank: of gradients of a loss that reads of each token what came before it, with padding."""
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(13) < torch.tensor([[9], [13]])).long()
    reference = build(kind, family)
    axes, config = {name: size for name, size in sizes.items() if name != "config"}, sizes.get("config")
    model = parallelize(copy.deepcopy(reference), build_mesh(resolve_sizes(2, **axes), "cpu"), config).eval()
    gradients: list[dict[str, Tensor]] = []
    for one in (reference, model):
        first = one(input_ids=ids * mask, attention_mask=mask)[0]
        (first * (1 + first.detach().cumsum(1))).mean().backward()
        gradients.append({n: whole(p.grad) for n, p in one.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert expected.keys() == found.keys()
    least = 1e-3 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = {n: (found[n] - g).norm() / torch.maximum(g.norm(), least) for n, g in expected.items()}
    return max((float(error), name) for name, error in errors.items())


@pytest.mark.parametrize(("kind", "family", "sizes"), with_long(ALL, *(case for case in ALL if case not in FAST)))
def test_gradients_are_those_of_one_process(kind: Any, family: str, sizes: dict[str, Any], pool2: Pool) -> None:
    for error in pool2.run(largest_error, kind, family, sizes):
        assert error[0] <= BOUND, error
