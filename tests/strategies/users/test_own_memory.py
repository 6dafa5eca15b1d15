"""Parameters that lie in memory otherwise than row by row, and those that share it with others."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.parallel.guards.own_memory import give_own_memory
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_habits_of_steps import Steps, compare
from tests.support.training import Recorder, batches, make_trainer, tiny_llama


class Turned(Steps):
    """Holds transposed matrices, as a user's initialization and peft's combinations of adapters leave them."""

    def configure_model(self) -> None:
        if self.model is None:
            self.numbers, self.model = [], tiny_llama()
            for parameter in self.model.parameters():
                if parameter.ndim == 2:
                    parameter.data = parameter.data.t().contiguous().t()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2"])
def test_turned_matrices_train_as_in_one_process(layout: str, nursery: Nursery) -> None:
    compare(nursery, Turned, layout)


class Adapted(Recorder):
    """LoRA on both ends of a tied model, whose factors peft makes views of each other."""

    def configure_model(self) -> None:
        if self.model is None:
            chosen = ["embed_tokens", "q_proj"]
            self.model = peft.get_peft_model(
                tiny_llama(), peft.LoraConfig(target_modules=chosen, ensure_weight_tying=True)
            )


class Beside(Recorder):
    """A head that is given another model's matrix in a parameter of its own."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.head = tiny_llama(), nn.Linear(1, 1, bias=False)
            self.head.weight = nn.Parameter(self.model.lm_head.weight)


def refusals() -> list[str]:
    found = []
    for kind in (Adapted, Beside):
        with pytest.raises(ValueError, match="of one memory") as refusal:
            make_trainer({}, max_steps=1).fit(kind(), batches(2))
        found.append(str(refusal.value))
    return found


def test_shared_memory_is_refused_by_name(nursery: Nursery) -> None:
    for adapters, head in Pool(nursery, 2).run(refusals, trainer=True):
        assert "embed_tokens.lora_embedding_A.default [8, 61] and" in adapters
        assert "lm_head.lora_B.default.weight [61, 8] are two parameters of one memory" in adapters
        assert "leave ensure_weight_tying out" in adapters
        assert "model.model.embed_tokens.weight [61, 24] and head.weight [61, 24]" in head


def parts(change: Any = None) -> nn.Module:
    """Two layers whose matrices are columns of one, side by side."""
    both, model = torch.randn(4, 6), nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])
    if change is not None:
        change(model)
    return model


def test_what_does_not_overlap_is_laid_out() -> None:
    model = parts()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    give_own_memory(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


def test_tied_and_frozen_are_no_error_and_a_buffer_is() -> None:
    give_own_memory(parts(lambda model: setattr(model[1], "weight", model[0].weight)))
    frozen = parts(lambda model: setattr(model[1], "weight", nn.Parameter(model[0].weight)))
    give_own_memory(frozen.requires_grad_(False))
    with pytest.raises(ValueError, match=r"0\.weight \[4, 3\] and 1\.before \[3\] are a parameter and a buffer"):
        give_own_memory(parts(lambda model: model[1].register_buffer("before", model[0].weight.detach()[1])))
