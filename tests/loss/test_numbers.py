"""Loss, log-probabilities, entropy and accuracy against float64, on whole logits and on logits that two ranks share."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_automodel.loss import (
    cross_entropy,
    entropy,
    gather_logits,
    get_logprobs_from_vocab_parallel_logits,
    top1,
    top1_accuracy,
)
from lightning_automodel.loss.functional import flat_losses
from lightning_automodel.loss.passes import Passes, compiled_passes
from lightning_automodel.testing.pool import Pool
from tests.loss.cases import IGNORED, UNCOMPILED, Case, assert_close, cases, for_all, leaf, reference_losses, whole
from tests.support.marks import with_long

ANY = cases()


def check_losses(mesh: DeviceMesh | None, passes: Passes | None = None, draw: Any = ANY, examples: int = 80) -> None:
    @for_all(draw, examples=examples)
    def check(case: Case) -> None:
        logits, exact = leaf(case.logits, mesh), leaf(case.logits.double())
        losses = flat_losses(logits, case.labels, IGNORED, case.smoothing, passes).view(case.labels.shape)
        expected = reference_losses(exact, case.labels, case.smoothing)
        assert losses.dtype == torch.float32
        assert_close(losses, expected, "losses")
        losses.backward(case.weights)
        expected.backward(case.weights.double())
        assert_close(whole(logits.grad), exact.grad, "gradient", case.logits.dtype)

    check()


def check_reductions(mesh: DeviceMesh | None) -> None:
    @for_all(cases(), examples=40)
    def check(case: Case) -> None:
        logits, exact = leaf(case.logits, mesh), leaf(case.logits.double())
        losses = reference_losses(exact, case.labels)
        assert_close(cross_entropy(logits, case.labels, reduction="none"), losses, "losses")
        expected = losses.sum()
        assert_close(cross_entropy(logits, case.labels, reduction="sum"), expected, "sum")
        mean = cross_entropy(logits, case.labels)
        expected = expected / (case.labels != IGNORED).sum().clamp(min=1)
        assert_close(mean, expected, "mean")
        mean.backward()
        expected.backward()
        assert_close(whole(logits.grad), exact.grad, "gradient", case.logits.dtype)
        if (case.labels == IGNORED).all():
            assert mean == 0
            assert not whole(logits.grad).any()

    check()


def check_entropy_and_accuracy(mesh: DeviceMesh | None) -> None:
    @for_all(cases(), examples=80)
    def check(case: Case) -> None:
        logits, exact = leaf(case.logits, mesh), leaf(case.logits.double())
        entropies = entropy(logits)
        log_p = exact.log_softmax(-1)
        expected = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
        assert_close(entropies, expected, "entropy")
        entropies.backward(case.weights)
        expected.backward(case.weights.double())
        assert_close(whole(logits.grad), exact.grad, "gradient of the entropy", case.logits.dtype)
        best = case.logits.float().argmax(-1)
        assert torch.equal(top1(logits), best)
        hits = ((best == case.labels) & (case.labels != IGNORED)).sum()
        assert top1_accuracy(logits, case.labels) == hits / (case.labels != IGNORED).sum().clamp(min=1)

    check()


def check_logprobs(mesh: DeviceMesh | None) -> None:
    @for_all(cases(), examples=40)
    def check(case: Case) -> None:
        ids = torch.where(case.labels == IGNORED, case.logits.float().argmax(-1), case.labels)
        logits, exact = leaf(case.logits, mesh), leaf(case.logits.double())
        actual = get_logprobs_from_vocab_parallel_logits(logits, ids)
        expected = exact.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        seen = expected.isfinite()
        assert_close(actual[seen], expected[seen], "log-probabilities")
        actual[seen].sum().backward()
        expected[seen].sum().backward()
        assert_close(whole(logits.grad), exact.grad, "gradient", case.logits.dtype)
        assert torch.equal(gather_logits(logits.detach()), case.logits)

    check()


def check_passes(mesh: DeviceMesh | None) -> None:
    check_losses(mesh, UNCOMPILED)


CHECKS = [check_losses, check_passes, check_reductions, check_entropy_and_accuracy, check_logprobs]


def check_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for check in CHECKS:
        check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", with_long([torch.float32, torch.bfloat16], torch.float32), ids=str)
def test_compiled_passes(dtype: torch.dtype) -> None:
    drawn = cases(batch=st.just(2), vocabulary=st.just(41), dtype=st.just(dtype))
    check_losses(None, compiled_passes("inductor", None), drawn, examples=10)


def test_evaluation_compiles_nothing_more_than_training() -> None:
    passes = compiled_passes("aot_eager", None)
    torch._dynamo.reset()
    for count, grad in enumerate([True, False, True]):
        counters.clear()
        with torch.set_grad_enabled(grad):
            losses = flat_losses(leaf(torch.randn(1, 6, 11)), torch.arange(6)[None], IGNORED, 0.0, passes)
        if grad:
            losses.sum().backward()
        assert counters["stats"]["unique_graphs"] == (0 if count else 2)


@pytest.mark.parametrize("check", CHECKS)
def test_whole_logits(check: Any) -> None:
    check(None)


@pytest.mark.slow
def test_logits_of_two_ranks(pool2: Pool) -> None:
    pool2.run(check_on_ranks)


def logprobs_of_parts(ids_are_parts: bool) -> float:
    """Context parallelism: each rank of cp has an early and a late piece of the sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 11, generator=generator).double()
    ids = torch.randint(11, (3, 8), generator=generator)
    order = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    exact = leaf(logits)
    expected = exact.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    (expected * expected.detach()).sum().backward()
    parts = distribute_tensor(logits[:, order], mesh, [Shard(1), Shard(2)], src_data_rank=None).requires_grad_()
    given = distribute_tensor(ids[:, order], mesh["cp"], [Shard(1)], src_data_rank=None) if ids_are_parts else ids
    actual = get_logprobs_from_vocab_parallel_logits(parts, given, order)
    (actual * actual.detach()).sum().backward()
    gradient = torch.empty_like(logits)
    gradient[:, order] = whole(parts.grad)
    return max((actual - expected).abs().max().item(), (gradient - exact.grad).abs().max().item())


@pytest.mark.parametrize("ids_are_parts", [False, True])
def test_logprobs_in_the_order_of_context_parallelism(ids_are_parts: bool, pool4: Pool) -> None:
    assert max(pool4.run(logprobs_of_parts, ids_are_parts)) < 1e-12


def test_seq_index_needs_a_context_axis() -> None:
    with pytest.raises(ValueError, match="leave it out, or pass DTensors"):
        get_logprobs_from_vocab_parallel_logits(torch.zeros(1, 4, 3), torch.zeros(1, 4).long(), torch.arange(4))


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_outside_of_the_vocabulary(label: int) -> None:
    with pytest.raises(ValueError, match=f"label {label} is outside of the vocabulary of 7"):
        cross_entropy(torch.zeros(2, 7), torch.tensor([0, label]))


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="reduction='avg' is not one of mean, sum, none"):
        cross_entropy(torch.zeros(2, 7), torch.zeros(2).long(), reduction="avg")


@pytest.mark.parametrize("function", [cross_entropy, top1_accuracy])
def test_targets_of_another_shape(function: Any) -> None:
    logits = torch.randn(2, 3, 7)
    for shape in ((3, 2), (2, 2), (1,), (2, 3, 7)):
        with pytest.raises(
            ValueError, match=r"do not fit to logits \[2, 3, vocab\]: give one for each position, \[2, 3\]"
        ):
            function(logits, torch.zeros(shape).long())
    targets = torch.randint(7, (2, 3))
    assert function(logits, targets.flatten()) == function(logits, targets)


@pytest.mark.parametrize("share", [2.0, -0.1, float("nan")])
def test_label_smoothing_that_is_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="use a number from 0 to 1"):
        cross_entropy(torch.zeros(2, 7), torch.zeros(2).long(), label_smoothing=share)


def placements() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole_logits = DTensor.from_local(torch.ones(2, 6), mesh, [Replicate()])
    assert cross_entropy(whole_logits, torch.zeros(2).long()).item() == pytest.approx(torch.tensor(6.0).log().item())
    with pytest.raises(ValueError, match="redistribute them first"):
        cross_entropy(DTensor.from_local(torch.ones(2, 6), mesh, [Partial()]), torch.zeros(2).long())


def test_placements_of_logits(pool2: Pool) -> None:
    pool2.run(placements)
