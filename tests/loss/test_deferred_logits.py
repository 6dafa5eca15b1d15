"""Logits that are not computed, against whole ones: what may stand between a head and a loss, and what may not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, linear

from lightning_automodel.distributed.collectives import copy_in, shard_bounds
from lightning_automodel.loss.deferred_logits import DeferredLogits
from lightning_automodel.loss.linear_recipe import LinearRecipe
from lightning_automodel.loss.sharded_logits import join_shards
from lightning_automodel.loss.vocab_parallel import VocabShard
from lightning_automodel.testing.pool import Pool
from tests.loss.cases import assert_close

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 6, 4, 9
Loss = Callable[[Tensor, Tensor], Tensor]


def draw() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [3, 6, 4], weight [9, 4] and labels [3, 6], some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(5, (ROWS, LENGTH), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.3, -100)


def deferred(hidden: Tensor, weight: Tensor, group: ProcessGroup | None = None) -> DeferredLogits:
    recipe = LinearRecipe(
        local=hidden,
        dim=hidden.ndim - 1,
        size=VOCABULARY,
        weight=weight,
        bias=None,
        shard=VocabShard.of(VOCABULARY, group),
        dtype=hidden.dtype,
        chunk_size=4,
        kernel="torch",
        owner="Model",
    )
    return DeferredLogits.from_recipe(recipe)


# ---- losses that models and users write ------------------------------------------------------------------------------


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As remote code of language models has it."""
    logits = logits.float()[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1))


def of_a_mask(logits: Tensor, labels: Tensor) -> Tensor:
    """As models have it that read sound: what is padding is taken out before the loss."""
    mask = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)[..., 1:] % 3 != 0
    return cross_entropy(logits[..., :-1, :][mask], labels[..., 1:][mask])


def transposed(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


def permuted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.permute(1, 2, 0), labels.T, reduction="sum")


def with_bias_of_ids(logits: Tensor, labels: Tensor) -> Tensor:
    """As decoders of translators have it."""
    logits = logits + torch.arange(VOCABULARY).view(1, -1) / 4
    return cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def soft_capped(logits: Tensor, labels: Tensor) -> Tensor:
    logits = 2.0 * torch.tanh(logits.float() / 3) * torch.tensor(1.5) + 1
    labels = labels.masked_fill(labels < 0, 2)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=2, reduction="sum")


def of_first_ids(logits: Tensor, labels: Tensor) -> Tensor:
    logits = (logits[..., :7] * torch.linspace(1, 2, 7))[..., :5]
    assert logits.shape == (ROWS, LENGTH, 5)
    return cross_entropy(logits.reshape(-1, 5), labels.reshape(-1))


def of_first_positions(logits: Tensor, labels: Tensor) -> Tensor:
    """The second of three dimensions is not the vocabulary, however many ids there are."""
    return cross_entropy(logits[:, :LENGTH].transpose(1, 2), labels) + cross_entropy(
        logits[:, :5].flatten(0, 1), labels[:, :5].flatten()
    )


def of_few_ids(logits: Tensor, labels: Tensor) -> Tensor:
    """The second of two ranks holds none of them."""
    logits = logits[..., :4] * torch.linspace(1, 2, 4)
    return cross_entropy(logits.reshape(-1, 4), labels.clamp(max=3).reshape(-1))


def of_no_position(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels > VOCABULARY
    none = cross_entropy(logits[mask].view(-1, VOCABULARY), labels[mask].view(-1), reduction="sum")
    return none + cross_entropy(logits.transpose(1, 2), labels)


def beside_constants(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        halved = logits / 2
    return cross_entropy(halved.mT, labels) * cross_entropy(logits.mT, labels)


def of_one_row(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[1], labels[1]) + cross_entropy(input=logits[2, 3], target=labels[2, 3].clamp(min=0))


def by_sizes(logits: Tensor, labels: Tensor) -> Tensor:
    rows, length, size = logits.shape
    assert (logits.ndim, logits.numel()) == (3, rows * length * size)
    return cross_entropy(logits.unsqueeze(0).squeeze(0).view(rows * length, size), labels.view(rows * length))


def of_no_label(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), torch.full_like(labels, -100).flatten(), reduction="sum")


LOSSES: list[Loss] = [
    *(shifted, of_a_mask, transposed, permuted, with_bias_of_ids),
    *(soft_capped, of_first_ids, of_one_row, by_sizes, of_no_label),
    *(of_first_positions, of_few_ids, of_no_position, beside_constants),
]


def check(loss: Loss, make: Callable[[Tensor, Tensor], Tensor], group: ProcessGroup | None = None) -> None:
    """The loss, and the gradients of hidden states and of this rank's rows of the weight, equal those of float64."""
    hidden, weight, labels = draw()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = loss(linear(*exact), labels)
    expected.backward()
    rows = shard_bounds(VOCABULARY, group.size(), group.rank()) if group else (0, VOCABULARY)
    given = [hidden.clone().requires_grad_(), weight.narrow(0, *rows).clone().requires_grad_()]
    actual = loss(make(copy_in(given[0], group) if group else given[0], given[1]), labels)
    actual.backward()
    assert_close(actual, expected, "loss")
    assert_close(given[0].grad, exact[0].grad, "gradient of hidden states")
    assert_close(given[1].grad, exact[1].grad.narrow(0, *rows), "gradient of the weight")


def check_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    for loss in LOSSES:
        check(loss, lambda hidden, weight: deferred(hidden, weight, group), group)
        check(loss, lambda hidden, weight: join_shards(linear(hidden, weight), mesh, VOCABULARY), group)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_models(loss: Loss) -> None:
    check(loss, deferred)


def test_losses_of_models_from_shards(pool2: Pool) -> None:
    pool2.run(check_on_ranks)


def biases_that_learn() -> None:
    """A whole bias beside shards, or beside deferred logits, gets the gradient of all ids on every rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hidden, weight, labels = draw()
    rows = weight.narrow(0, *shard_bounds(VOCABULARY, 2, mesh.get_local_rank()))
    shards = join_shards(linear(hidden, rows), mesh, VOCABULARY)
    found = []
    for logits in (linear(hidden, weight), shards, deferred(hidden, rows, mesh.get_group())):
        bias = torch.zeros(VOCABULARY, requires_grad=True)
        cross_entropy(((logits + bias) + bias.detach()).flatten(0, 1), labels.flatten()).backward()
        found.append(bias.grad)
    torch.testing.assert_close(found[1:], [found[0]] * 2)


def scales_that_learn() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hidden, weight, labels = draw()
    rows = weight.narrow(0, *shard_bounds(VOCABULARY, 2, mesh.get_local_rank()))
    found = []
    for logits in (linear(hidden, weight), join_shards(linear(hidden, rows), mesh, VOCABULARY)):
        scale = torch.ones(ROWS, 1, 1, requires_grad=True)
        cross_entropy((logits * scale).flatten(0, 1), labels.flatten()).backward()
        found.append(scale.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("check", [biases_that_learn, scales_that_learn])
def test_what_learns_beside_shards(check: Callable[[], None], pool2: Pool) -> None:
    pool2.run(check)


# ---- what is refused -------------------------------------------------------------------------------------------------

MIXING: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(),
    "last ids": lambda x: x[..., 1:],
    "without the last id": lambda x: x[..., :-1],
    "several factors": lambda x: x * torch.ones(LENGTH, 1),
    "learned factor": lambda x: x * torch.ones((), requires_grad=True),
    "two of them": lambda x: x + x.tanh(),
    "in place": lambda x: x.mul_(2),
    "some ids in place": lambda x: x.__setitem__((..., [1, 2]), 0.0),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(0)),
    "cat": lambda x: torch.cat([x, x]),
    "largest": lambda x: x.max(-1),
    "ids in place of positions": lambda x: x.view(ROWS, VOCABULARY, LENGTH),
    "data": lambda x: x.data,
    "weights of classes": lambda x: cross_entropy(x[0], torch.zeros(LENGTH).long(), torch.ones(VOCABULARY)),
    "probabilities": lambda x: cross_entropy(x[0], torch.zeros(LENGTH, VOCABULARY)),
    "losses of tokens": lambda x: cross_entropy(x[0], torch.zeros(LENGTH).long(), reduction="none"),
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("operation", MIXING.values(), ids=MIXING)
def test_other_functions_are_refused(operation: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match=r"Model calls \w+ on its logits.*use chunked_loss=None"):
        operation(deferred(*draw()[:2]))


def test_elements_that_nobody_computed_are_no_numbers() -> None:
    class Past(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.detach().as_subclass(Tensor).clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    with torch._C.DisableTorchFunctionSubclass():
        assert Past.apply(deferred(*draw()[:2])).isnan().all()
