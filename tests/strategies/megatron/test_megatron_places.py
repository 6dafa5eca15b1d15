"""What users put in the place of parameters that Megatron-FSDP shards: the library computes with its own."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.subjects import gather_part
from tests.support.training import HIDDEN, Descending, batches, make_trainer


class WithOwn(Descending):
    """Calls the model with its own parameters, by name."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        own = dict(self.model.named_parameters())
        return torch.func.functional_call(self.model, own, (), {"input_ids": batch[0], "labels": batch[0]}).loss


class OneOther(Descending):
    """Calls the model with another weight of a norm."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        other = {"model.norm.weight": torch.full((HIDDEN,), 3.0)}
        return torch.func.functional_call(self.model, other, (), {"input_ids": batch[0], "labels": batch[0]}).loss


class Averaged(Descending):
    """Reads the model with an average of its parameters, which are shards, too."""

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        average = {name: p.detach() * 0.5 for name, p in self.model.named_parameters()}
        with torch.no_grad():
            torch.func.functional_call(self.model, average, (), {"input_ids": batch[0]})


class Assigned(Descending):
    """Gives a norm a new weight behind the first batch."""

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.model.model.norm.weight = nn.Parameter(torch.full((HIDDEN,), 2.0))


def train(layout: str | None) -> dict[str, Tensor | None]:
    """Runs on each rank, or on one device."""
    strategy, size = (LAYOUTS[layout].make(), LAYOUTS[layout].data_size) if layout else (SingleDeviceStrategy("cpu"), 1)
    module = WithOwn()
    make_trainer(strategy, max_epochs=2).fit(module, batches(size))
    return {name: gather_part(p) for name, p in module.named_parameters()}


def meet(layout: str, kinds: list[type[Descending]]) -> list[str]:
    """Runs on each rank."""
    said = []
    for kind in kinds:
        with pytest.raises(ValueError, match="another tensor") as caught:
            make_trainer(LAYOUTS[layout].make(), max_epochs=1).fit(kind(), batches(LAYOUTS[layout].data_size))
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("layout", ["megatron1-dp2", "megatron3-tp2"])
def test_a_call_with_its_own_parameters_is_a_call(layout: str, pool2: Pool) -> None:
    """Below stage 3 it ended in a KeyError."""
    found = pool2.run(train, layout, trainer=True)[0]
    torch.testing.assert_close(found, train(None), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["megatron1-dp2", "megatron3-dp2"])
def test_other_tensors_are_refused(layout: str, pool2: Pool) -> None:
    """They were left out, and the loss was that of the parameters themselves."""
    for said in pool2.run(meet, layout, [OneOther, Averaged, Assigned], trainer=True):
        for message, name in zip(said, ("model.norm", "model.embed_tokens", "model.norm"), strict=True):
            assert (
                f"LlamaForCausalLM is called with another tensor in the place of its parameter {name}.weight" in message
            )
            assert "parameter.copy_(value)" in message
