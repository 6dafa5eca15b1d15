"""Which kernels are refused, and how those of other libraries would be called (none runs without CUDA)."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss.deferred_logits import DeferredLogits
from lightning_automodel.loss.kernels import check_kernel
from lightning_automodel.loss.linear_recipe import LinearRecipe
from lightning_automodel.loss.vocab_parallel import VocabShard


@pytest.mark.parametrize(
    ("kernel", "tp", "device", "message"),
    [
        ("liger", 2, "cuda", "needs the whole vocabulary on each rank, but tp=2"),
        ("liger", 1, "cpu", "runs on CUDA, and the mesh is on 'cpu'"),
        ("cut_cross_entropy", 1, "cuda", "pip install cut-cross-entropy; or use loss_kernel='torch'"),
    ],
)
def test_kernels_that_cannot_run(kernel: str, tp: int, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kernel(kernel, tp, device)


def test_fields() -> None:
    with pytest.raises(ValueError, match="loss_kernel='fast' is not one of torch, liger, cut_cross_entropy"):
        FSDP2Config(loss_kernel="fast")
    with pytest.raises(ValueError, match="chunked_loss=0 must be at least 1"):
        FSDP2Config(chunked_loss=0)
    for wrong in (True, 1e3, "1024"):
        with pytest.raises(TypeError, match="must be a whole number of tokens"):
            FSDP2Config(chunked_loss=wrong)


def standin(hidden: Tensor, weight: Tensor, target: Tensor, bias: Any = None, **kwargs: Any) -> Tensor:
    return cross_entropy(linear(hidden, weight, bias), target, **kwargs)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the names and parameters of the two libraries."""
    names = {
        "liger_kernel.transformers.functional": "liger_fused_linear_cross_entropy",
        "cut_cross_entropy": "linear_cross_entropy",
    }
    for path, function in names.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        setattr(sys.modules[path], function, standin)


def deferred(kernel: str) -> tuple[DeferredLogits, Tensor]:
    torch.manual_seed(0)
    recipe = LinearRecipe(
        local=torch.randn(2, 3, 4),
        dim=2,
        size=7,
        weight=torch.randn(7, 4),
        bias=None,
        shard=VocabShard(7),
        dtype=torch.float32,
        chunk_size=2,
        kernel=kernel,
        owner="Model",
    )
    return DeferredLogits.from_recipe(recipe), torch.arange(6)


@pytest.mark.parametrize("kernel", ["liger", "cut_cross_entropy"])
@pytest.mark.usefixtures("libraries")
def test_the_same_sum(kernel: str) -> None:
    expected, labels = deferred("torch")
    actual, _ = deferred(kernel)
    torch.testing.assert_close(actual.recipe.loss_sum(labels, 1, 0.0), expected.recipe.loss_sum(labels, 1, 0.0))
    if kernel == "liger":
        torch.testing.assert_close(actual.recipe.loss_sum(labels, 1, 0.1), expected.recipe.loss_sum(labels, 1, 0.1))


@pytest.mark.usefixtures("libraries")
def test_what_kernels_lack() -> None:
    logits, labels = deferred("cut_cross_entropy")
    with pytest.raises(ValueError, match="has no label smoothing"):
        logits.recipe.loss_sum(labels, -100, 0.1)
    with pytest.raises(ValueError, match=r"Model changes its logits.*loss_kernel='torch'"):
        (logits * 2).recipe.loss_sum(labels, -100, 0.0)
