"""Parameters of a LightningModule's own that come, go or change between two runs, against one process."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_habits_of_steps import Steps, fitted
from tests.strategies.users.test_own_parameters_in_steps import BySamplesByHand, Scaled
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import batches, make_trainer, rows, tiny_llama, whole_parameters


class Twice(Scaled):
    """Trains in two runs, between which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.model = [], tiny_llama()
        self.change()

    def between(self) -> Steps:
        """Change, and return what the second run trains."""
        return self


class MadeOfShards(Twice):
    """Makes a parameter of a weight that is sharded, and deletes another."""

    def between(self) -> Steps:
        with torch.no_grad():
            self.prompt = nn.Parameter(self.model.model.norm.weight.detach().clone())
        del self.temperature
        return self

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss / getattr(self, "temperature", 1)
        return loss + loss.detach() * self.prompt.exp().mean()


class Numbered(Twice):
    """Goes on with numbers in the place of its parameters."""

    def between(self) -> Steps:
        temperature = self.temperature.item()
        del self.temperature, self.prompt
        self.temperature = temperature  # type: ignore[assignment]
        with torch.no_grad():
            self.numbers.append(float(self(rows()[:4]).norm()))
        return self

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits / self.temperature

    def loss(self, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(self(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


class OfAnother(Twice):
    """Its model goes on in another module, of whose parameters only some samples read one."""

    def between(self) -> Steps:
        other = BySamplesByHand()
        other.numbers, other.model = self.numbers, self.model
        other.change()
        return other


def fitted_twice(kind: type[Twice], layout: str | None) -> dict[str, Any]:
    first = kind()
    size = LAYOUTS[layout].data_size if layout else 1
    make_trainer(LAYOUTS[layout].make() if layout else "auto", max_epochs=1).fit(first, batches(size))
    second = first.between()
    make_trainer(LAYOUTS[layout].make() if layout else "auto", max_epochs=1).fit(second, batches(size))
    losses = [*first.losses, *(() if second is first else second.losses)]
    return {"losses": losses, "numbers": second.numbers, "parameters": whole_parameters(second)}


KINDS = (MadeOfShards, Numbered, OfAnother)
CASES = [(kind, layout) for kind in KINDS for layout in ("fsdp2-dp2", "fsdp2-dp2-tp2")]


@pytest.mark.parametrize(("kind", "layout"), with_long(CASES, *(case for case in CASES if case[1] != "fsdp2-dp2")))
def test_second_runs_are_those_of_one_process(kind: type[Twice], layout: str, nursery: Nursery) -> None:
    one = Pool(nursery, 1).run(fitted_twice, kind, None, trainer=True)[0]
    for many in Pool(nursery, LAYOUTS[layout].ranks).run(fitted_twice, kind, layout, trainer=True):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["numbers"] == pytest.approx(one["numbers"], rel=1e-5)
        for name, value in one["parameters"].items():
            torch.testing.assert_close(many["parameters"][name], value, rtol=1e-4, atol=1e-5)


class Saved(Scaled):
    """Writes a parameter to a file within its step."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        file = io.BytesIO()
        torch.save(self.prompt, file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        assert type(read) is nn.Parameter
        assert not vars(read)
        assert torch.equal(read, self.prompt)
        return super().loss(batch)


def test_a_step_saves_plain_tensors(pool2: Pool) -> None:
    assert all(found["losses"] for found in pool2.run(fitted, Saved, "fsdp2-dp2", trainer=True))
