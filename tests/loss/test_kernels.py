"""Which kernels are refused, and how those of other libraries would be called (none runs without CUDA)."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss.deferred_logits import DeferredLogits, LinearRecipe
from lightning_automodel.loss.kernels import check_kernel
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
        hidden=torch.randn(2, 3, 4),
        weight=torch.randn(7, 4),
        bias=None,
        shard=VocabShard(7),
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
    torch.testing.assert_close(actual.loss_sum(labels, 1, 0.0), expected.loss_sum(labels, 1, 0.0))
    if kernel == "liger":
        torch.testing.assert_close(actual.loss_sum(labels, 1, 0.1), expected.loss_sum(labels, 1, 0.1))


@pytest.mark.usefixtures("libraries")
def test_what_kernels_lack() -> None:
    logits, labels = deferred("cut_cross_entropy")
    with pytest.raises(ValueError, match="has no label smoothing"):
        logits.loss_sum(labels, -100, 0.1)
    with pytest.raises(ValueError, match=r"Model changes its logits.*loss_kernel='torch'"):
        (logits * 2).loss_sum(labels, -100, 0.0)


# ---- logits that are not computed ------------------------------------------------------------------------------------


def test_operations_are_repeated() -> None:
    logits, labels = deferred("torch")
    recipe = logits.recipe
    changed = (2.0 * torch.tanh(logits.float() / 3) * torch.tensor(1.5) + 1)[..., :5]
    assert changed.shape == (2, 0, 5)
    whole = linear(recipe.hidden, recipe.weight).flatten(0, 1)
    expected = (3.0 * torch.tanh(whole / 3) + 1)[:, :5]
    torch.testing.assert_close(
        changed.loss_sum(labels, 5, 0.1),
        cross_entropy(expected, labels, ignore_index=5, label_smoothing=0.1, reduction="sum"),
    )


MIXING = {
    "softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(),
    "positions": lambda x: x[:, :-1],
    "last ids": lambda x: x[..., 1:],
    "several factors": lambda x: x * torch.ones(7),
    "learned factor": lambda x: x * torch.ones((), requires_grad=True),
    "in place": lambda x: x.mul_(2),
    "cat": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("operation", MIXING.values(), ids=MIXING)
def test_other_operations_are_refused(operation: Any) -> None:
    logits, _ = deferred("torch")
    with pytest.raises(ValueError, match=r"Model calls .* on its logits"):
        operation(logits)
