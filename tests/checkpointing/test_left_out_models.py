"""A second model of the same class that checkpoints leave out has the weights of its files after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.training import Descending, SaveAfter, batches, make_trainer, tiny_llama

STEPS, SAVED = 4, 2


class Preferring(Descending):
    """Keeps close to a reference, which its ``state_dict`` leaves out."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.read("policy")
            self.keep(self.read("reference").requires_grad_(False))

    def read(self, name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.directory / name)

    def keep(self, reference: nn.Module) -> None:
        self.reference = reference

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("reference.")}

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            expected = self.reference(batch[0]).logits.softmax(-1)
        return nn.functional.cross_entropy(self.model(batch[0]).logits.flatten(0, 1), expected.flatten(0, 1))


class Hidden(Preferring):
    """Keeps the reference where ``state_dict`` does not look."""

    def keep(self, reference: nn.Module) -> None:
        vars(self)["reference"] = reference


class HiddenFirst(Hidden):
    """Reads the reference before the model that checkpoints hold."""

    def configure_model(self) -> None:
        if self.model is None:
            self.keep(self.read("reference"))
            self.model = self.read("policy")


def train(kind: type[Preferring], sizes: dict[str, Any] | None, directory: Path, resume: Path | None) -> list[float]:
    module = kind(directory)
    strategy = DDPStrategy() if sizes is None else FSDP2TPStrategy(**sizes)
    callbacks = [] if resume else [SaveAfter(directory / "mid.ckpt", SAVED)]
    ranks = 1 if sizes else 2
    make_trainer(strategy, max_epochs=1, callbacks=callbacks).fit(module, batches(ranks), ckpt_path=resume)
    return module.losses


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "policy")
    other = tiny_llama()
    with torch.no_grad():
        other.model.norm.weight.add_(1)
        other.model.embed_tokens.weight.mul_(3)
    other.save_pretrained(tmp_path / "reference")
    return tmp_path


CASES = [(Preferring, {}, {"tp": 2}), (Hidden, None, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_it_is_read_again(kind: type[Preferring], before: Any, after: Any, pool2: Pool, directory: Path) -> None:
    whole = pool2.run(train, kind, before, directory, None, trainer=True)[0]
    again = pool2.run(train, kind, after, directory, directory / "mid.ckpt", trainer=True)[0]
    assert len(whole) == STEPS
    assert again == pytest.approx(whole[SAVED:], abs=1e-6)


def test_what_took_the_place_of_another_is_named(pool2: Pool, directory: Path) -> None:
    pool2.run(train, HiddenFirst, None, directory, None, trainer=True)
    with pytest.raises(RankFailed, match=r"weight of a LlamaForCausalLM is not in it.*strict_loading=False"):
        pool2.run(train, HiddenFirst, None, directory, directory / "mid.ckpt", trainer=True)
