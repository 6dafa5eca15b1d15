"""Forward passes in ``torch.inference_mode()`` beside training: of a teacher, of a reference, of the model itself."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_automodel.parallel.fsdp2 import over_gloo
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import batches, make_trainer, tiny_llama


class Taught(Noted):
    """By a frozen model, which no forward pass calls otherwise."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama()
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.inference_mode():
            taught = self.teacher(input_ids=batch[0]).logits
        output = self.model(input_ids=batch[0], labels=batch[0])
        return output.loss + 10 * functional.mse_loss(output.logits, taught.clone())


class ReadFirst(Noted):
    """Generates by itself before it trains on that."""

    @torch.inference_mode()
    def continued(self, ids: Tensor) -> Tensor:
        return self.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids = self.continued(batch[0]).clone()
        return self.model(input_ids=ids, labels=ids).loss


def fitted(kind: type[Noted], layout: str | None, is_stock: bool = False) -> dict[str, Any]:
    """Runs on each rank; ``is_stock``: FSDP2 gathers as it does on GPUs."""
    if is_stock:
        over_gloo.gather_by = lambda unit, gather, allocating: None
    chosen = LAYOUTS[layout] if layout else None
    strategy, size = (chosen.make(), chosen.data_size) if chosen else ("auto", 1)
    module = kind()
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2).fit(module, batches(size))
    return {"losses": module.losses, "gradients": module.gradients}


CASES = [
    (Taught, "fsdp2-dp2", False),
    (Taught, "fsdp2-dp2", True),
    (Taught, "fsdp2-dp2-tp2", False),
    (ReadFirst, "fsdp2-dp2", False),
    (ReadFirst, "fsdp2-dp2", True),
    (ReadFirst, "fsdp2-dp2-tp2", False),
]


@pytest.mark.parametrize(("kind", "layout", "is_stock"), with_long(CASES, CASES[2], CASES[5]))
def test_training_is_that_of_one_process(kind: type[Noted], layout: str, is_stock: bool, nursery: Nursery) -> None:
    one = Pool(nursery, 1).run(fitted, kind, None, trainer=True)[0]
    for many in Pool(nursery, LAYOUTS[layout].ranks).run(fitted, kind, layout, is_stock, trainer=True):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for expected, found in zip(one["gradients"], many["gradients"], strict=True):
            check_gradients(expected, found)
