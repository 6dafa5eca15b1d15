"""Parameters that a LightningModule holds itself, or a module of the user's around a model, against one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_automodel import DDPConfig, DDPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_habits_of_steps import Steps, compare, fitted
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import (
    HIDDEN,
    SaveAfter,
    batches,
    largest_difference,
    make_trainer,
    rows,
    whole,
    whole_parameters,
)

UNUSED = DDPConfig(find_unused_parameters=True)
LAYOUT_NAMES = ("fsdp2-dp2", "fsdp2-tp2", "fsdp2-dp2-tp2", "fsdp2-cp2")


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))))


class Own(Steps):
    """A temperature, prompts, weights of losses in lists and dicts; one that no loss reads, and one that is frozen."""

    def change(self) -> None:
        self.other = None
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.prompt = drawn(3, HIDDEN)
        self.weights = nn.ParameterList([drawn(2), drawn(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(5)), "unused": nn.Parameter(torch.ones(3))})
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids = batch[0]
        rows = torch.cat([self.prompt.expand(len(ids), -1, -1), self.model.get_input_embeddings()(ids)], 1)
        logits = self.model(inputs_embeds=rows).logits[:, 3:] / self.temperature
        prompted = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        plain = self.model(input_ids=ids, labels=ids).loss
        weighed = [loss * torch.exp(-w[0]) + w.sum() for loss, w in zip((prompted, plain), self.weights, strict=True)]
        return sum(weighed) + self.named["scale"].square().sum() * plain * self.frozen.mean() * 0.1


class Scaled(Steps):
    """A scale as CLIP has it, which is held within bounds within a step and behind it, and logged."""

    def change(self) -> None:
        self.other = None
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.tensor([-0.2]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.logit_scale.data.clamp_(max=0.6)
        logits = self.model(input_ids=batch[0]).logits * self.logit_scale.exp() + self.bias
        self.log("scale", self.logit_scale.exp())
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def on_after_backward(self) -> None:
        self.numbers.append(float(whole(self.logit_scale.grad)))

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.logit_scale.clamp_(0.45, 0.55)
            self.bias.mul_(0.9)
        self.numbers += [self.logit_scale.item(), self.bias.item()]
        self.log("clamped", self.logit_scale)


class Prompted(nn.Module):
    """A model with prompts and a head of a user's own: one module, which holds a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.prompt, self.head = model, drawn(2, HIDDEN), drawn(HIDDEN, 7)
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([self.prompt.expand(len(ids), -1, -1), self.model.get_input_embeddings()(ids)], 1)
        states = self.model(inputs_embeds=rows, output_hidden_states=True).hidden_states[-1]
        return (states @ self.head).square().mean() * self.scale.float()


class Wrapped(Steps):
    """Such a module, called twice in a step, once through torch's own checkpointing."""

    def change(self) -> None:
        self.other, self.model = None, Prompted(self.model)

    def loss(self, batch: list[Tensor]) -> Tensor:
        recomputed: Any = checkpoint(self.model, batch[0], use_reentrant=False)
        return 100 * (recomputed + self.model(batch[0].flip(1)))


class ByHand(Steps):
    """Two optimizers that take turns, by ``loss.backward()``, with a parameter of each that the other's loss reads."""

    automatic_optimization = False

    def change(self) -> None:
        self.first, self.second = nn.Parameter(torch.tensor([0.7, 0.3])), nn.Parameter(torch.tensor(1.2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for index, (optimizer, model) in enumerate(zip(self.optimizers(), (self.model, self.other), strict=True)):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            for part in (batch[0], batch[0].flip(1)):
                loss = model(input_ids=part, labels=part).loss * self.first.sum() * self.second + self.first[index]
                self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
                loss.backward()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        pairs = ((self.model, self.first), (self.other, self.second))
        return [torch.optim.SGD([*model.parameters(), own], lr=0.2, momentum=0.9) for model, own in pairs]


class BySamples(Steps):
    """Some samples read a parameter and others do not, and another is read every second batch."""

    def change(self) -> None:
        self.other = None
        self.extra, self.seldom = drawn(4), drawn(3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        if share := (batch[0].sum(1) % 2).float().mean():  # of a rank with one row all or nothing
            loss = loss + 3 * share * self.extra.exp().sum()
        return loss + self.seldom.square().sum() if self.trainer.global_step % 2 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1, foreach=True)


class Frozen(Steps):
    """A parameter that a hook thaws, and one that the step itself freezes."""

    def change(self) -> None:
        self.other = None
        self.thawed, self.kept = drawn(3).requires_grad_(False), drawn(3)

    def on_train_epoch_start(self) -> None:
        self.thawed.requires_grad_(self.current_epoch > 0)

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.kept.requires_grad_(self.current_epoch == 0)
        return super().loss(batch) * (self.thawed.exp().sum() + self.kept.exp().sum())


class HookedSums(Steps):
    """A hook on what is added to a gradient."""

    def change(self) -> None:
        self.other = None
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.temperature.register_post_accumulate_grad_hook(self.note)

    def note(self, parameter: Tensor) -> None:
        self.numbers.append(float(whole(parameter.grad)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) / self.temperature


KINDS = (Own, Scaled, Wrapped, ByHand, BySamples, Frozen, HookedSums)


CASES = [(kind, layout) for kind in KINDS for layout in LAYOUT_NAMES]
FAST = [(kind, "fsdp2-dp2") for kind in KINDS] + [(Own, "fsdp2-tp2"), (Wrapped, "fsdp2-dp2-tp2"), (Own, "fsdp2-cp2")]


@pytest.mark.parametrize(("kind", "layout"), with_long(CASES, *(case for case in CASES if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Steps], layout: str, nursery: Nursery) -> None:
    compare(nursery, kind, layout)


# ---- runs, files and copies ------------------------------------------------------------------------------------------


class Evaluated(Own):
    """Reads its own parameters in evaluation, and in a forward pass outside of runs."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits / self.temperature

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).sum((1, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def run_twice(layout: str, path: Path) -> dict[str, Any]:
    """Runs on each rank: a fit with averaged weights, evaluation, a second fit that goes on, and calls outside."""
    chosen, module, shown = LAYOUTS[layout], Evaluated(), rows()[:2]
    size, options = chosen.data_size, {"config": UNUSED} if layout.startswith("ddp") else {}
    numbers: list[float] = []
    for epochs in (1, 2):
        average = [EMAWeightAveraging(decay=0.8)] if epochs == 2 else []
        saver = SaveAfter(path / f"{epochs}.ckpt", 2)
        trainer = make_trainer(chosen.make(**options), max_epochs=epochs, callbacks=[saver, *average])
        resumed = {"ckpt_path": path / "1.ckpt", "weights_only": False} if epochs == 2 else {}
        trainer.fit(module, batches(size), batches(size), **resumed)
        numbers += [float(trainer.callback_metrics["val_loss"])]
        numbers += [float(trainer.validate(module, batches(size), verbose=False)[0]["val_loss"])]
        predicted: Any = trainer.predict(module, batches(size))
        numbers.append(float(trainer.strategy.reduce(torch.cat(predicted).mean())))
        with torch.no_grad():
            numbers.append(float(module(shown).square().mean()))
    with pytest.raises(TypeError, match="cannot assign"):
        module.temperature = torch.ones(())  # type: ignore[assignment]
    return {"losses": module.losses, "numbers": numbers, "parameters": whole_parameters(module)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(LAYOUT_NAMES, *LAYOUT_NAMES[1:]))
def test_runs_follow_each_other(layout: str, nursery: Nursery, tmp_path: Path) -> None:
    one = Pool(nursery, 1).run(run_twice, "ddp-1", tmp_path / "one", trainer=True)[0]
    for many in Pool(nursery, LAYOUTS[layout].ranks).run(run_twice, layout, tmp_path / "many", trainer=True):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["numbers"] == pytest.approx(one["numbers"], rel=1e-5)
        for name, value in one["parameters"].items():
            torch.testing.assert_close(many["parameters"][name], value, rtol=1e-4, atol=1e-5)


FILES = {
    "dp_shard=2": ({"dp_shard": 2}, 2),
    "tp=2, one file": ({"tp": 2, "save_distributed_checkpoint": False}, 1),
    "DDP": (None, 2),
}


def train_on(layout: str, path: Path, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: between two micro-batches of the second step it saves."""
    sizes, data = FILES[layout]
    module = Evaluated()
    strategy: Any = DDPStrategy(UNUSED) if sizes is None else sizes
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    saver = [] if resume else [SaveAfter(path, 3)]
    make_trainer(strategy, callbacks=saver, **settings).fit(module, batches(data), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module)}


@pytest.mark.slow
@pytest.mark.parametrize("source", FILES)
def test_it_goes_on_in_any_layout(source: str, pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "mid.ckpt"
    whole = pool2.run(train_on, source, path, None, trainer=True)[0]
    for layout in FILES:
        again = pool2.run(train_on, layout, path, path, trainer=True)[0]
        assert again["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6), layout
        assert largest_difference(again, whole) < 5e-6, layout


class Saved(Scaled):
    """Reads ranks' own numbers when it is made, which differ."""

    def change(self) -> None:
        super().change()
        self.noise = nn.Parameter(torch.full((2,), float(os.environ.get("RANK", "0"))))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.noise.sum()


def values_at_first() -> list[float]:
    module = Saved()
    make_trainer({"dp_shard": 2}, max_steps=1).fit(module, batches(2))
    return whole(module.noise).tolist()


def test_ranks_begin_with_the_same(pool2: Pool) -> None:
    first, second = pool2.run(values_at_first, trainer=True)
    assert first == second == pytest.approx([-0.3, -0.3])


# ---- what is refused -------------------------------------------------------------------------------------------------


class Tied(Scaled):
    def change(self) -> None:
        super().change()
        self.table = self.model.get_input_embeddings().weight


class OnMeta(Scaled):
    def change(self) -> None:
        super().change()
        with torch.device("meta"):
            self.extra = nn.Parameter(torch.empty(3))


def refuse(kind: type[Scaled], layout: str) -> str:
    with pytest.raises(ValueError, match=r"table|extra|logit_scale") as error:
        fitted(kind, layout)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (Tied, "fsdp2-dp2", "table is model.model.embed_tokens.weight, of which it would be a copy"),
        (OnMeta, "fsdp2-dp2", "extra is on the meta device"),
        (Scaled, "megatron3-dp2", "the parameter logit_scale belongs to no layer whose forward is called"),
    ],
)
def test_what_cannot_train_is_named(kind: type[Scaled], layout: str, words: str, pool2: Pool) -> None:
    assert all(words in text for text in pool2.run(refuse, kind, layout, trainer=True))
