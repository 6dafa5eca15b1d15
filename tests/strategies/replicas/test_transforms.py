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


def move() -> list[dict[str, Tensor]]:
    """Runs on each rank."""
    module, size = Moved(), world_size()
    make_trainer(DDPStrategy() if size > 1 else "auto", max_epochs=1).fit(module, batches(size))
    return module.gradients


def move_shards(tp: int) -> str:
    """Runs on each rank."""
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        make_trainer(FSDP2TPStrategy(tp=tp), max_epochs=1).fit(Moved(), batches(world_size() // tp))
    return str(caught.value)


def test_replicas_have_transforms(pool2: Pool) -> None:
    """They ended in an error of torch where a pass reads the states of generators."""
    expected = move()
    for found in pool2.run(move, trainer=True):
        for many, one in zip(found, expected, strict=True):
            check_gradients(many, one)


@pytest.mark.parametrize("tp", [1, 2])
def test_shards_say_what_to_use(tp: int, pool2: Pool) -> None:
    for message in pool2.run(move_shards, tp, trainer=True):
        assert message.startswith("torch.func (grad, vmap, jacrev) runs through a model that is sharded")
