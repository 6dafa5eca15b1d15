"""Metrics on whole logits and on logits that ranks share, over data ranks with uneven batches."""

import copy
import pickle

import pytest
import torch
import torchmetrics.text
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.metrics import Perplexity, TokenAccuracy, TokenCounter
from lightning_automodel.strategies.metric_states import reduce_metrics_over
from lightning_automodel.testing.pool import Pool


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Logits [2, seq, 11] and labels of one data rank; their lengths differ."""
    generator = torch.Generator().manual_seed(rank)
    logits = 3 * torch.randn(2, 5 + 3 * rank, 11, generator=generator)
    labels = torch.where(torch.rand(logits.shape[:2], generator=generator) < 0.5, logits.argmax(-1), 7)
    labels = labels.roll(1, 1)  # so that half of the next tokens are the most probable ones
    labels[:, 2] = -100
    return logits, labels


def expected(ranks: list[int]) -> dict[str, float]:
    pairs = [(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for logits, labels in map(batch, ranks)]
    logits, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    counts = targets != -100
    return {
        "perplexity": cross_entropy(logits, targets).exp().item(),
        "accuracy": (logits.argmax(-1) == targets)[counts].float().mean().item(),
        "tokens": sum((batch(rank)[1] != -100).sum().item() for rank in ranks),
    }


def measured() -> dict[str, float]:
    """On 2 data ranks with 2 tensor-parallel ranks each."""
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    logits, labels = batch(mesh["dp_shard"].get_local_rank())
    cut = distribute_tensor(logits, mesh["tp"], [Shard(2)], src_data_rank=None)
    metrics = torch.nn.ModuleDict({"perplexity": Perplexity(), "accuracy": TokenAccuracy(), "tokens": TokenCounter()})
    reduce_metrics_over(metrics, mesh["dp"].get_group())
    metrics["perplexity"].update(cut, labels)
    metrics["accuracy"].update(cut, labels)
    metrics["tokens"].update(labels)
    return {name: metric.compute().item() for name, metric in metrics.items()}


def test_shared_logits_over_data_ranks(pool4: Pool) -> None:
    for result in pool4.run(measured):
        assert result == pytest.approx(expected([0, 1]), rel=1e-5)


def test_several_batches_on_one_process() -> None:
    perplexity, accuracy, counter = Perplexity(), TokenAccuracy(), TokenCounter()
    for rank in (0, 1):
        logits, labels = batch(rank)
        perplexity.update(logits.requires_grad_(), labels)
        accuracy.update(logits, labels)
        counter.update(labels)
    result = {"perplexity": perplexity.compute(), "accuracy": accuracy.compute(), "tokens": counter.compute()}
    assert {k: v.item() for k, v in result.items()} == pytest.approx(expected([0, 1]), rel=1e-5)
    assert not perplexity.total.requires_grad


def test_against_torchmetrics_without_shift() -> None:
    logits, labels = batch(1)
    theirs = torchmetrics.text.Perplexity(ignore_index=-100)(logits, labels)
    torch.testing.assert_close(Perplexity(shift=False)(logits, labels), theirs)


def test_no_targets() -> None:
    logits, labels = batch(0)
    assert Perplexity()(logits, torch.full_like(labels, -100)) == 1
    assert TokenAccuracy()(logits, torch.full_like(labels, -100)) == 0


def test_a_model_that_returned_no_logits() -> None:
    for metric in (Perplexity(), TokenAccuracy()):
        with pytest.raises(TypeError, match=r"needs logits.*call it without labels for them, or use chunked_loss=None"):
            metric(None, torch.zeros(2, 3).long())


def test_masked_tokens_do_not_count() -> None:
    ids = torch.arange(6).view(2, 3)
    assert TokenCounter()(ids, torch.tensor([[1, 1, 0], [1, 0, 0]])) == 3
    assert TokenCounter(ignore_index=4)(ids) == 5


@pytest.mark.parametrize("metric", [Perplexity, TokenAccuracy, TokenCounter])
def test_copies_and_pickles(metric: type) -> None:
    for twin in (copy.deepcopy(metric()), pickle.loads(pickle.dumps(metric()))):
        assert type(twin) is metric
