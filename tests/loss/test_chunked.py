"""The loss from hidden states and a weight, against float64 logits, on one process and with rows on two ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear

from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.distributed.collectives import copy_in, shard_bounds
from lightning_automodel.loss.chunked import ChunkOptions, chunked_loss_sum
from lightning_automodel.loss.functional import count_targets
from lightning_automodel.loss.passes import Passes, compiled_passes
from lightning_automodel.loss.vocab_parallel import VocabShard
from lightning_automodel.testing.pool import Pool
from tests.loss.cases import IGNORED, UNCOMPILED, assert_close, for_all, reference_losses
from tests.support.marks import with_long

TRANSFORMS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "soft-capping": lambda x: torch.tanh(x / 3.0) * 3.0,
    "scale": lambda x: x * 0.25,
    "cast": lambda x: x.to(torch.promote_types(x.dtype, torch.float32)),
}


@dataclass(frozen=True)
class Problem:
    """``hidden`` [tokens, width], ``weight`` [vocab, width], ``labels`` [tokens] from a seed."""

    seed: int
    tokens: int
    vocabulary: int
    chunk: int
    smoothing: float
    ignored: float
    transform: str
    with_bias: bool
    reduction: str
    dtype: torch.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.tokens, 6, generator=generator).to(self.dtype)
        weight = torch.randn(self.vocabulary, 6, generator=generator).to(self.dtype)
        bias = torch.randn(self.vocabulary, generator=generator).to(self.dtype) if self.with_bias else None
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        labels[torch.rand(self.tokens, generator=generator) < self.ignored] = IGNORED
        return hidden, weight, bias, labels


PROBLEMS = st.builds(
    Problem,
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(1, 30),
    vocabulary=st.integers(1, 41),
    chunk=st.integers(1, 40),
    smoothing=st.sampled_from([0.0, 0.2]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    transform=st.sampled_from(list(TRANSFORMS)),
    with_bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


def rows(value: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return value
    return value.narrow(0, *shard_bounds(value.shape[0], group.size(), group.rank()))


def loss_by_call(problem: Problem, inputs: list[Tensor], labels: Tensor, group: ProcessGroup | None) -> Tensor:
    return chunked_linear_cross_entropy(
        inputs[0],
        inputs[1],
        labels,
        chunk_size=problem.chunk,
        group=group,
        vocab_size=problem.vocabulary if group else None,
        bias=inputs[2] if problem.with_bias else None,
        logit_transform=TRANSFORMS[problem.transform],
        label_smoothing=problem.smoothing,
        reduction=problem.reduction,
    )


def loss_by_passes(
    problem: Problem, inputs: list[Tensor], labels: Tensor, group: ProcessGroup | None, passes: Passes
) -> Tensor:
    """The loss as a model has it whose blocks are compiled."""
    options = ChunkOptions(
        chunk_size=problem.chunk,
        shard=VocabShard.of(problem.vocabulary, group),
        transform=TRANSFORMS[problem.transform],
        label_smoothing=problem.smoothing,
        passes=passes,
    )
    hidden = copy_in(inputs[0], group) if group else inputs[0]
    bias = inputs[2] if problem.with_bias else None
    total = chunked_loss_sum(hidden, inputs[1], bias, labels, options)
    return total / count_targets(labels) if problem.reduction == "mean" else total


def check(group: ProcessGroup | None, examples: int, passes: Passes | None = None) -> None:
    @for_all(PROBLEMS, examples=examples)
    def compare(problem: Problem) -> None:
        hidden, weight, bias, labels = problem.tensors()
        inputs = [hidden, rows(weight, group), *([rows(bias, group)] if bias is not None else [])]
        inputs = [x.clone().requires_grad_() for x in inputs]
        if passes is None:
            loss = loss_by_call(problem, inputs, labels, group)
        else:
            loss = loss_by_passes(problem, inputs, labels, group, passes)
        (3 * loss).backward()
        exact = [x.double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        expected = reference(problem, exact, labels)
        (3 * expected).backward()
        assert loss.dtype == torch.promote_types(problem.dtype, torch.float32)
        assert_close(loss, expected, "loss", problem.dtype)
        for name, actual, wanted in zip(["hidden", "weight", "bias"], inputs, exact, strict=False):
            gradient = wanted.grad if name == "hidden" else rows(wanted.grad, group)
            assert actual.grad.dtype == problem.dtype
            assert_close(actual.grad, gradient, f"gradient of {name}", problem.dtype)
        if problem.ignored == 1:
            assert loss == 0
            assert not any(x.grad.any() for x in inputs)

    compare()


def reference(problem: Problem, exact: list[Tensor], labels: Tensor) -> Tensor:
    logits = linear(*exact)
    transform = TRANSFORMS[problem.transform]
    losses = reference_losses(logits if transform is None else transform(logits), labels, problem.smoothing)
    count = (labels != IGNORED).sum().clamp(min=1) if problem.reduction == "mean" else 1
    return losses.sum() / count


def check_on_ranks() -> None:
    check(dist.group.WORLD, examples=50)
    check(dist.group.WORLD, examples=30, passes=UNCOMPILED)


def test_whole_weight() -> None:
    check(None, examples=120)


def test_passes_that_a_compiler_would_fuse() -> None:
    check(None, examples=60, passes=UNCOMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", with_long([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
def test_compiled_passes(dtype: torch.dtype) -> None:
    passes = compiled_passes("inductor", None)
    for transform, smoothing, tokens in (("none", 0.0, 24), ("none", 0.0, 19), ("soft-capping", 0.2, 24)):
        problem = Problem(0, tokens, 41, 8, smoothing, 0.4, transform, False, "mean", dtype)
        hidden, weight, _, labels = problem.tensors()
        inputs = [hidden.requires_grad_(), weight.requires_grad_()]
        loss = loss_by_passes(problem, inputs, labels, None, passes)
        loss.backward()
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = reference(problem, exact, labels)
        expected.backward()
        assert_close(loss, expected, "loss", dtype)
        for name, actual, wanted in zip(("hidden", "weight"), inputs, exact, strict=True):
            assert_close(actual.grad, wanted.grad, f"gradient of {name}", dtype)


def test_weight_of_two_ranks(pool2: Pool) -> None:
    pool2.run(check_on_ranks)


def arguments(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    given = {"hidden": torch.randn(8, 4), "weight": torch.randn(5, 4), "labels": torch.arange(8) % 5, "chunk_size": 3}
    return given | changes


def test_a_frozen_weight_gets_no_gradient() -> None:
    given = arguments()
    given["hidden"].requires_grad_()
    loss = chunked_linear_cross_entropy(**given)
    (saved,) = [x for x in loss.grad_fn.next_functions[0][0].saved_tensors if x is not None]
    assert saved.shape == given["hidden"].shape
    loss.backward()
    assert given["weight"].grad is None


def test_no_gradients_without_grad_mode() -> None:
    given = arguments()
    given["weight"].requires_grad_()
    with torch.no_grad():
        assert not chunked_linear_cross_entropy(**given).requires_grad


def test_a_second_backward_pass_is_refused() -> None:
    given = arguments()
    given["weight"].requires_grad_()
    loss = chunked_linear_cross_entropy(**given)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"gives its gradients to one backward pass.*or use chunked_loss=None"):
        loss.backward()


def test_autocast() -> None:
    given = arguments()
    given["weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_linear_cross_entropy(**given)
    loss.backward()
    expected = chunked_linear_cross_entropy(**(given | {k: given[k].bfloat16() for k in ("hidden", "weight")}))
    assert torch.equal(loss, expected)
    assert given["weight"].grad.dtype == torch.float32


def slices_that_do_not_fit() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cut = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(TypeError, match=r"weight is a DTensor \[5, 4\].*weight.to_local\(\) with group=.*vocab_size=5"):
        chunked_linear_cross_entropy(**arguments(weight=cut))
    with pytest.raises(ValueError, match=r"weight has 5 rows, but DTensor gives rank \d of 2 [32] of vocab_size=5"):
        chunked_linear_cross_entropy(**arguments(), group=mesh.get_group(), vocab_size=5)


def test_slices_that_do_not_fit(pool2: Pool) -> None:
    pool2.run(slices_that_do_not_fit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1"),
        ({"reduction": "none"}, "reduction='none' must be mean or sum"),
        ({"labels": torch.arange(3)}, "8 hidden states have 3 labels"),
        ({"labels": torch.arange(8)}, "label 5 is outside of the vocabulary of 5"),
        ({"hidden": torch.zeros(2, 4, 4)}, r"hidden \[2, 4, 4\] and labels \[8\] must be .* flatten them"),
        ({"weight": torch.zeros(5, 3)}, r"hidden \[8, 4\] does not fit to weight \[5, 3\]"),
        ({"weight": torch.zeros(5, 4).bfloat16()}, "hidden is torch.float32 and weight is torch.bfloat16; cast one"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 is a share of the target; use a number from 0 to 1"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_linear_cross_entropy(**arguments(**changes))
