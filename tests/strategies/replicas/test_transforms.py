"""Transforms of torch.func around a model: replicas have them, shards say that they do not."""

import pytest
import torch
from torch import Tensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.training import batches, make_trainer, world_size


class Moved(Noted):
    """Its loss is taken where its own gradient with respect to what enters has moved that."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        entered = self.model.get_input_embeddings()(batch[0]).detach()
        moved = torch.func.grad(lambda x: self.model(inputs_embeds=x).logits.logsumexp(-1).sum())(entered)
        return self.model(inputs_embeds=entered + moved, labels=batch[0]).loss


class MovedByLoss(Noted):
    """Moves each sample by the gradient of its own loss of labels, some of which do not count."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        labels = batch[0].clone()
        labels[:, :2] = -100
        entered = self.model.get_input_embeddings()(batch[0]).detach()
        moved = torch.func.grad(lambda x: self.model(inputs_embeds=x, labels=labels).loss * len(labels))(entered)
        each = torch.func.vmap(torch.func.grad(self.loss_of_one))(self.model(inputs_embeds=entered).logits, labels)
        assert each.shape[:2] == labels.shape
        return self.model(inputs_embeds=entered + moved, labels=labels).loss + (each**2).sum() / len(labels)

    def loss_of_one(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.model.loss_function(logits=logits[None], labels=labels[None], vocab_size=logits.shape[-1])


def move(kind: type[Noted]) -> list[dict[str, Tensor]]:
    """Runs on each rank."""
    module, size = kind(), world_size()
    make_trainer(DDPStrategy() if size > 1 else "auto", max_epochs=1).fit(module, batches(size))
    return module.gradients


def move_shards(tp: int) -> str:
    """Runs on each rank."""
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        make_trainer(FSDP2TPStrategy(tp=tp), max_epochs=1).fit(Moved(), batches(world_size() // tp))
    return str(caught.value)


@pytest.mark.parametrize("kind", [Moved, MovedByLoss])
def test_replicas_have_transforms(kind: type[Noted], pool2: Pool) -> None:
    """They ended in an error of torch where a pass reads the states of generators, and in one of autograd functions
    without setup_context where the loss comes from labels.
    """
    expected = move(kind)
    for found in pool2.run(move, kind, trainer=True):
        for many, one in zip(found, expected, strict=True):
            check_gradients(many, one)


@pytest.mark.parametrize("tp", [1, 2])
def test_shards_say_what_to_use(tp: int, pool2: Pool) -> None:
    for message in pool2.run(move_shards, tp, trainer=True):
        assert message.startswith("torch.func (grad, vmap, jacrev) runs through a model that is sharded")
