"""Adapters that samples choose, on data ranks with other samples: exact where all of them require a gradient, and an
error where they do on some ranks.
"""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import check_gradients
from tests.strategies.users.test_parts_of_models import STEPS, WINDOW, Tasks, fitted
from tests.support.training import tiny_llama


class Chosen(Tasks):
    """Trains the adapter of its micro-batch; of a step, all ranks train both, in another order."""

    adapters = "abba"

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            self.model = get_peft_model(tiny_llama(), config, "a")
            self.model.add_adapter("b", config)

    def loss(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        self.model.set_adapter(self.adapters[batch["number"] % WINDOW])
        return self.model(input_ids=batch["ids"], labels=batch["ids"]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "lora_" in n], lr=0.3, momentum=0.9)


class OfOneRank(Chosen):
    """Each data rank has an adapter to itself."""

    adapters = "abab"


class AllRequireGradients(OfOneRank):
    """The way out that the error names."""

    def loss(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        self.model.set_adapter(self.adapters[batch["number"] % WINDOW])
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return self.model(input_ids=batch["ids"], labels=batch["ids"]).loss


@pytest.mark.parametrize("kind", [Chosen, AllRequireGradients])
def test_gradients_are_those_of_one_process(kind: type[Tasks], nursery: Nursery, pool2: Pool) -> None:
    (one,) = Pool(nursery, 1).run(fitted, kind, None, trainer=True)
    for many in pool2.run(fitted, kind, "dp", trainer=True):
        assert len(one["gradients"]) == len(many["gradients"]) == STEPS
        for expected, found in zip(one["gradients"], many["gradients"], strict=True):
            assert expected.keys() == found.keys()
            check_gradients(expected, found)


def refusal() -> str:
    """Runs on each rank."""
    with pytest.raises(RuntimeError, match="requires_grad has to be the same on all ranks") as caught:
        fitted(OfOneRank, "dp")
    return str(caught.value)


def test_adapters_of_one_rank_are_refused(pool2: Pool) -> None:
    for message in pool2.run(refusal, trainer=True):
        assert message.startswith("optimizer step 0: rank 0 trains model.base_model.model.model.layers.1.")
        assert "lora_A.a.weight, rank 1 trains" in message
        assert "lora_A.b.weight, and not all ranks do" in message
