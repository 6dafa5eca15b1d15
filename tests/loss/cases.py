"""Draws logits and labels, and computes in float64 what the functions under test must give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from lightning_automodel.loss.passes import Passes, _add_up, _write_gradient

IGNORED = -100
UNCOMPILED = Passes(_add_up, _write_gradient)
"""What a compiler would fuse: each shape would be compiled anew."""


@dataclass(frozen=True, repr=False)
class Case:
    """One drawn problem.

    Attributes:
        logits: [batch, seq, vocab], float32 or bfloat16.
        labels: [batch, seq], some ignored, perhaps all.
        smoothing: of the labels.
        weights: [batch, seq], float32: a gradient for results per token.
    """

    logits: Tensor
    labels: Tensor
    smoothing: float
    weights: Tensor

    def __repr__(self) -> str:
        return f"Case({tuple(self.logits.shape)}, {self.logits.dtype}, labels={self.labels.tolist()}, {self.smoothing})"


_UP_TO_3, _UP_TO_41 = st.integers(1, 3), st.integers(1, 41)
_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def cases(
    draw: Any,
    batch: st.SearchStrategy[int] = _UP_TO_3,
    vocabulary: st.SearchStrategy[int] = _UP_TO_41,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
) -> Case:
    """Shapes, vocabularies from 1 on, scales up to 1e4, ignored patterns from none to all, masked columns."""
    rows, length, columns = draw(batch), draw(st.integers(1, 9)), draw(vocabulary)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    logits = torch.randn(rows, length, columns, generator=generator) * draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    labels = torch.randint(columns, (rows, length), generator=generator)
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    labels[torch.rand(rows, length, generator=generator) < share] = IGNORED
    smoothing = draw(st.sampled_from([0.0, 0.1, 1.0]))
    if not smoothing and draw(st.booleans()):
        masked = torch.rand(logits.shape, generator=generator) < 0.3
        logits[masked.scatter(-1, labels.clamp(min=0).unsqueeze(-1), False)] = -torch.inf
    return Case(logits.to(draw(dtype)), labels, smoothing, torch.randn(rows, length, generator=generator))


def for_all(*strategies: Any, examples: int = 40) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """As ``given``, for ranks: every rank draws the same examples, and stops at the first that fails."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        quiet = settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        return quiet(given(*strategies)(check))

    return decorate


def leaf(logits: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """A copy of ``logits`` that takes gradients; with ``mesh`` cut on the vocabulary."""
    copy = logits.detach().clone()
    if mesh is not None:
        copy = distribute_tensor(copy, mesh, [Shard(copy.ndim - 1)], src_data_rank=None)
    return copy.requires_grad_()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """[batch, seq] in float64."""
    losses = cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
    )
    return losses.view(labels.shape)


def assert_close(actual: Tensor, expected: Tensor, what: str, dtype: torch.dtype = torch.float32) -> None:
    """Within the rounding of ``dtype``, relative to the largest value that is expected."""
    assert torch.isfinite(actual).all(), what
    scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
    error = (actual.double() - expected.double()).abs().max() / scale if expected.numel() else torch.zeros(())
    assert error < 8 * torch.finfo(dtype).eps, f"{what}: relative error {error:.1e}"
