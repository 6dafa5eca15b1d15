"""One GPU: losses in float32 and bfloat16 against float64, their memory, nothing that waits for the device; kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as reference
from torch.nn.functional import linear

from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.loss import cross_entropy, entropy
from lightning_automodel.loss.functional import flat_losses
from lightning_automodel.loss.kernels import LOSS_KERNELS
from lightning_automodel.loss.linear_recipe import LinearRecipe
from lightning_automodel.loss.passes import compiled_passes
from lightning_automodel.loss.vocab_parallel import VocabShard

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def problem(dtype: torch.dtype, tokens: int = 300, vocabulary: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and labels of which a third does not count."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").mul(0.1).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    labels[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def assert_same(loss: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0) -> None:
    """Loss and gradients, relative to float64."""
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = reference(linear(*exact), labels, label_smoothing=smoothing)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for actual, wanted in zip((hidden, weight), exact, strict=True):
        assert (actual.grad - wanted.grad).norm() < BOUND[hidden.dtype] * wanted.grad.norm()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_whole_logits(dtype: torch.dtype) -> None:
    hidden, weight, labels = problem(dtype)
    assert_same(cross_entropy(linear(hidden, weight), labels), hidden, weight, labels)
    assert entropy(linear(hidden, weight)).isfinite().all()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_chunks(dtype: torch.dtype) -> None:
    hidden, weight, labels = problem(dtype)
    assert_same(chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=128), hidden, weight, labels)


def recipe(hidden: Tensor, weight: Tensor, kernel: str = "torch", chunk: int = 128) -> LinearRecipe:
    """A loss without logits, as a model has it whose blocks are compiled."""
    return LinearRecipe(
        local=hidden[None],
        dim=2,
        size=weight.shape[0],
        weight=weight,
        bias=None,
        shard=VocabShard(weight.shape[0]),
        dtype=hidden.dtype,
        chunk_size=chunk,
        kernel=kernel,
        passes=compiled_passes("inductor", None),
        owner="test",
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_compiled_passes(dtype: torch.dtype, smoothing: float) -> None:
    hidden, weight, labels = problem(dtype)
    loss = recipe(hidden, weight).loss_sum(labels, -100, smoothing) / (labels != -100).sum()
    assert_same(loss, hidden, weight, labels, smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_compiled_passes_over_whole_logits(dtype: torch.dtype, smoothing: float) -> None:
    hidden, weight, labels = problem(dtype)
    losses = flat_losses(linear(hidden, weight), labels, -100, smoothing, compiled_passes("inductor", None))
    assert_same(losses.sum() / (labels != -100).sum(), hidden, weight, labels, smoothing)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": lambda hidden, weight, labels: reference(linear(hidden, weight).float(), labels),
    "whole": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels),
    "chunks": lambda hidden, weight, labels: chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=256),
    "compiled": lambda *given: recipe(*given[:2], chunk=256).loss_sum(given[2], -100, 0.0),
}


def peak(dtype: torch.dtype, loss: str) -> int:
    """Bytes above what was held before."""
    hidden, weight, labels = problem(dtype, tokens=4096, vocabulary=32_000)
    for _ in range(2):  # the first one may compile
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        LOSSES[loss](hidden, weight, labels).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_chunks_take_less_memory(dtype: torch.dtype) -> None:
    of = {loss: peak(dtype, loss) for loss in LOSSES}
    assert of["chunks"] < of["whole"] / 4
    assert of["chunks"] < of["torch"] / 8
    assert of["compiled"] < of["torch"] / 16


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Within this context waiting for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device() -> None:
    hidden, weight, labels = problem(torch.float32)
    with no_synchronization():
        cross_entropy(linear(hidden, weight), labels).backward()
        chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=128).backward()
        clip_grad_norm_([hidden, weight], 1.0)


@pytest.mark.parametrize("kernel", [name for name, (module, _) in LOSS_KERNELS.items() if module])
def test_kernels(kernel: str) -> None:
    if find_spec(LOSS_KERNELS[kernel][0]) is None:
        pytest.skip(f"{LOSS_KERNELS[kernel][1]} is not installed")
    hidden, weight, labels = problem(torch.bfloat16)
    loss = recipe(hidden, weight, kernel).loss_sum(labels, -100, 0.0) / (labels != -100).sum()
    assert_same(loss, hidden, weight, labels)
