"""What users do between the passes of modules that Megatron-FSDP shards, with the weights of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from lightning_automodel import FSDP2TPStrategy, MegatronFSDPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.adapted import with_adapter
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Descending,
    Recorder,
    SaveAfter,
    batches,
    make_trainer,
    tiny_llama,
)


class ChangesGradients(Recorder):
    """Freezes norms and halves the rest, as soon as gradients are there."""

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.0 if "norm" in name else 0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PlainBackward(Descending):
    """Calls ``backward`` of the loss itself."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class TwicePerGraph(Descending):
    """Goes back through one graph twice."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        with getattr(self.trainer.strategy, "block_backward_sync", torch.enable_grad)():
            self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss / 2)
        optimizer.step()


class InParts(Descending):
    """Calls parts of the model, never the model itself."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.model.lm_head(self.model.model(input_ids=batch[0]).last_hidden_state)
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


class Adversarial(Descending):
    """Trains on embeddings that were moved along the gradient of the loss."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return super().loss(batch)
        embedding, seen = self.model.get_input_embeddings(), []
        with embedding.register_forward_hook(lambda module, args, output: seen.append(output)):
            loss = super().loss(batch)
        (gradient,) = torch.autograd.grad(loss, seen[0])
        with embedding.register_forward_hook(lambda module, args, output: output + 0.1 * gradient.sign()):
            return super().loss(batch)


class Saliency(Descending):
    """Trains layers of one's own, which return a tensor, at inputs moved along their gradient."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(LENGTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = (batch[0] / VOCABULARY).requires_grad_(torch.is_grad_enabled())
        if not torch.is_grad_enabled():
            return self.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(self.model(inputs).sum(), inputs)
        return self.model(inputs.detach() + 0.1 * gradient.sign()).square().mean()


class Shrinks(Descending):
    """Writes into its weights."""

    def shrink(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


class ShrinksBehindBackward(Shrinks):
    on_after_backward = Shrinks.shrink


class ShrinksBehindBatches(Shrinks):
    on_train_batch_end = Shrinks.shrink


class ShrinksBehindValidation(Shrinks):
    on_validation_epoch_end = on_validation_end = Shrinks.shrink


class ReadsElsewhere(Descending):
    """Reads its loss at other weights, written by ``parameter.data``, and puts its own back, as averages by hand do."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        own = [parameter.data.clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            self.loss(batch)
        for parameter, value in zip(self.parameters(), own, strict=True):
            parameter.data.copy_(value)


class WithoutGradients(Descending):
    """Descends along differences of losses."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        losses = []
        with torch.no_grad():
            for distance in (0.01, -0.02, 0.01):
                for parameter in self.parameters():
                    parameter.add_(torch.ones_like(parameter), alpha=distance)
                losses.append(self.loss(batch))
            slope = float(self.trainer.strategy.reduce(losses[0] - losses[1]))  # type: ignore[arg-type]
            for parameter in self.parameters():
                parameter.sub_(torch.ones_like(parameter), alpha=slope)


class Reads(Descending):
    """Reads a weight behind the forward pass, and at every end."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.read()
        return loss

    def read(self, *args: Any) -> None:
        for parameter in self.parameters():
            assert parameter.detach().clone() is not None

    on_before_backward = on_after_backward = on_train_batch_end = on_validation_batch_end = read  # type: ignore[assignment]


class Averaged(Descending):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.ways = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, ids: Tensor, way: int) -> Tensor:
        return self.head(self.ways[way](self.embedding(ids)))


class Skips(Descending):
    """Calls one of two layers in turns; the other one has no gradient, and neither decays nor moves on."""

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.model = TwoWays()

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.model(batch[0], self.trainer.global_step % 2)
        return cross_entropy(logits.flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class ClearsByZeros(Skips):
    """The other layer has a gradient of zeros, with which it decays and moves on."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class LeavesGradients(ClearsByZeros):
    """Two steps have the gradient of the first layer, which the second backward pass does not reach."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if batch_idx % 2:
            optimizer.zero_grad()


class ReadsBeforeStep(PlainBackward):
    """Reads what the model says of other samples between the backward pass and the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        self.loss([batch[0].flip(1)])
        optimizer.step()


class ClearsByModule(PlainBackward):
    """Throws a gradient away behind a forward pass, when parameters that compute may be in place."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.loss(batch).backward()
        loss = self.loss([batch[0].flip(1)])
        self.model.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class ReadsInHooks(Shrinks):
    """Reads its loss wherever a hook may, and shrinks its weights behind that."""

    def loss_of_first(self, *args: Any) -> Tensor:
        return self.loss([self.trainer.train_dataloader.dataset.tensors[0][:2]])  # type: ignore[union-attr]

    on_after_backward = on_before_optimizer_step = on_train_batch_start = loss_of_first  # type: ignore[assignment]

    def on_train_batch_end(self, *args: Any) -> None:
        self.loss_of_first()
        self.shrink()


class Measured(Descending):
    """Clips by torch's own function, by norms of its own, and by Lightning's."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        largest = max(float(gradient.norm()) for gradient in gradients)
        total = grad_norm(self, 2)["grad_2.0_norm_total"]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * largest / float(total)


class AdaptedEnds(TwicePerGraph):
    """Reads parameters of a module that is never called: adapters of embeddings lie in a ParameterDict."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = with_adapter(tiny_llama(tied=False), "ends")


CASES: list[type[Recorder]] = [
    AdaptedEnds,
    ChangesGradients,
    PlainBackward,
    TwicePerGraph,
    InParts,
    Adversarial,
    Saliency,
    ShrinksBehindBackward,
    ShrinksBehindBatches,
    ShrinksBehindValidation,
    ReadsElsewhere,
    WithoutGradients,
    Reads,
    Averaged,
    Skips,
    ClearsByZeros,
    LeavesGradients,
    ReadsBeforeStep,
    ReadsInHooks,
    ClearsByModule,
    Measured,
]


def run(strategy: Strategy, data_size: int, case: type[Recorder]) -> dict[str, Any]:
    module = case()
    accumulate = 2 if module.automatic_optimization and case is not ChangesGradients else 1
    average = [callbacks.EMAWeightAveraging(decay=0.5)] if case is Averaged else []
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 2, "callbacks": average}
    make_trainer(strategy, max_epochs=1, **settings).fit(module, batches(data_size), batches(data_size))
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


def on_ranks(layout: str, cases: list[type[Recorder]]) -> list[dict[str, Any]]:
    return [run(LAYOUTS[layout].make(), LAYOUTS[layout].data_size, case) for case in cases]


LONG = ("megatron0-dp2", "megatron1-dp2", "megatron2-dp2", "megatron3-tp2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(("megatron3-dp2", *LONG), *LONG))
def test_weights_are_those_of_one_device(layout: str, pool2: Pool) -> None:
    without_plan = (Skips, Saliency)
    cases = [case for case in CASES if not issubclass(case, without_plan) or "tp2" not in layout]
    found = pool2.run(on_ranks, layout, cases, trainer=True, timeout=120)[0]
    for case, weights in zip(cases, found, strict=True):
        expected = run(SingleDeviceStrategy(), 1, case)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5, msg=lambda m, case=case: f"{case}: {m}")


class Penalized(Descending):
    """Adds the gradient's gradient to its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = self.model.get_input_embeddings()(batch[0]).detach().requires_grad_()
        loss = self.model(inputs_embeds=inputs, labels=batch[0]).loss
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()


def penalize(layout: str) -> str:
    with pytest.raises(NotImplementedError) as caught:
        run(LAYOUTS[layout].make(), LAYOUTS[layout].data_size, Penalized)
    return str(caught.value)


def test_second_order_is_refused(pool2: Pool) -> None:
    for message in pool2.run(penalize, "megatron3-dp2", trainer=True):
        assert "create_graph=True: a model that Megatron-FSDP shards gives no gradient of a gradient" in message


class WithScalar(Descending):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.scale = nn.Parameter(torch.tensor(1.0))


class Bounded(nn.Linear):
    """Keeps its weight in bounds, in its forward pass."""

    how = "data"

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "data":
                self.weight.data.clamp_(-0.01, 0.01)
            elif self.how == "copy":
                self.weight.copy_(normalize(self.weight, dim=-1))
            else:
                self.weight.data = normalize(self.weight.data, dim=-1)
        return super().forward(x)


class WritesWeights(Descending):
    """In a layer of a block, or in the head that is in none."""

    def __init__(self, how: str, is_in_block: bool) -> None:
        super().__init__(tied=False)
        self.how, self.is_in_block = how, is_in_block

    def configure_model(self) -> None:
        super().configure_model()
        layer = self.model.model.layers[1].mlp.down_proj if self.is_in_block else self.model.lm_head
        layer.__class__ = type("Bounded", (Bounded,), {"how": self.how})


class GivesData(Descending):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class Centers(Descending):
    """Takes the mean of each row from gradients, of which tensor parallelism has a part."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradient in (parameter.grad for parameter in self.parameters()):
            if gradient is not None and gradient.ndim > 1:
                gradient.sub_(gradient.mean(dim=1, keepdim=True))


class ClipsByHand(Descending):
    """Clips by torch's function where no hook of Lightning runs."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Noisy(Descending):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad))  # type: ignore[union-attr,arg-type]


class BehindEachBackward(Descending):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class NeedsWholes(Descending):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            if parameter.ndim == 2:
                parameter.detach() @ parameter.detach().mT


class Gathers(Descending):
    def on_train_batch_end(self, *args: Any) -> None:
        self.model.model.norm.weight.full_tensor()


class FromWithin(PlainBackward):
    """Goes back from what a hook has kept, before the loss or behind it, or by the strategy."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        kept: list[Tensor] = []
        with self.model.model.layers[0].register_forward_hook(lambda module, args, output: kept.append(output)):
            loss = self.loss(batch)
        losses = [kept[0].square().mean(), loss]
        for each in reversed(losses) if self.way == "behind" else losses:
            backward = self.manual_backward if self.way == "by strategy" else Tensor.backward
            backward(each, retain_graph=True)
        optimizer.step()


def weights_from_within(strategy: Strategy) -> dict[str, Any]:
    module = FromWithin("by strategy")
    make_trainer(strategy, max_epochs=1).fit(module, batches(2 if isinstance(strategy, MegatronFSDPStrategy) else 1))
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


def from_within(layout: str) -> dict[str, Any]:
    for way in ("before", "behind"):
        with pytest.raises(ValueError, match=r"began at a tensor that their model did not return.*manual_backward"):
            make_trainer(LAYOUTS[layout].make(), max_epochs=1).fit(FromWithin(way), batches(2))
    return weights_from_within(LAYOUTS[layout].make())


@pytest.mark.parametrize("layout", with_long(["megatron1-dp2", "megatron3-dp2"], "megatron1-dp2"))
def test_a_pass_from_within_is_the_strategys(layout: str, pool2: Pool) -> None:
    found = pool2.run(from_within, layout, trainer=True)[0]
    torch.testing.assert_close(found, weights_from_within(SingleDeviceStrategy()), rtol=1e-4, atol=1e-6)


def meet_refusals(directory: Path) -> list[str]:
    messages = []
    layout = LAYOUTS["megatron2-dp2"]
    with pytest.raises(ValueError, match="no dimensions") as caught:
        make_trainer(layout.make(), max_epochs=1).fit(WithScalar(), batches(layout.data_size))
    messages.append(str(caught.value))
    with pytest.raises(TypeError, match=r"parameter\.data = value") as given:
        make_trainer(layout.make(), max_epochs=1).fit(GivesData(), batches(layout.data_size))
    messages.append(str(given.value))
    for how, is_in_block in (("data", True), ("copy", False), ("given", True), ("given", False)):
        for name in ("megatron2-dp2", "megatron3-dp2"):
            with pytest.raises(ValueError, match=r"writes into its parameter .*weight, which is gathered"):
                make_trainer(LAYOUTS[name].make(), max_epochs=1).fit(WritesWeights(how, is_in_block), batches(2))
    for kind in (NeedsWholes, Gathers):
        with pytest.raises(ValueError, match="rows in uneven numbers"):
            make_trainer(layout.make(), max_epochs=1).fit(kind(), batches(layout.data_size))
    for name in ("megatron2-dp2", "megatron3-tp2"):
        with pytest.raises(ValueError, match="randn_like on a parameter or gradient that Megatron-FSDP shards"):
            make_trainer(LAYOUTS[name].make(), max_epochs=1).fit(Noisy(), batches(LAYOUTS[name].data_size))
    for each in (Centers, ClipsByHand):
        with pytest.raises(ValueError, match="which tp has cut, would be that of this rank's part"):
            make_trainer(LAYOUTS["megatron3-tp2"].make(), max_epochs=1).fit(each(), batches(1))
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4}
    with pytest.raises(ValueError, match="on_after_backward or backward names gradients, and Megatron-FSDP keeps"):
        make_trainer(layout.make(), **settings).fit(BehindEachBackward(), batches(layout.data_size))
    saver = SaveAfter(directory / "mid.ckpt", 3)
    with pytest.raises(RuntimeError, match="micro-batches") as failed:
        make_trainer(layout.make(), callbacks=[saver], **settings).fit(Descending(), batches(layout.data_size))
    messages.append(str(failed.value))
    make_trainer(FSDP2TPStrategy(), callbacks=[saver], **settings).fit(Descending(), batches(layout.data_size))
    with pytest.raises(RuntimeError, match="micro-batches") as failed:
        make_trainer(layout.make(), **settings).fit(Descending(), batches(layout.data_size), ckpt_path=saver.path)
    return [*messages, str(failed.value)]


@pytest.mark.slow
def test_what_it_cannot_do_is_said(pool2: Pool, tmp_path: Path) -> None:
    for scalar, given, saved, resumed in pool2.run(meet_refusals, tmp_path, trainer=True):
        assert "scale of LlamaForCausalLM has no dimensions" in scalar
        assert "parameter.copy_(value)" in given
        assert "save after an optimizer step" in saved
        assert "mid.ckpt was saved between the micro-batches of an optimizer step" in resumed
        assert "FSDP2TPStrategy" in resumed
