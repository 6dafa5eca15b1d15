"""What users do between forward, backward and step, against one process: two models that train in turn, averages and
norms by hand, random numbers on gradients and weights, hooks that come late.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from lightning_automodel import DDPConfig
from lightning_automodel.parallel.guards.gather_order import take_gathers
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.layouts import LAYOUTS
from tests.support.marks import SHARDS_TAKE_MASKS, with_long
from tests.support.training import (
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Recorder,
    batches,
    make_trainer,
    tiny_llama,
    whole_parameters,
)

LAYOUT_NAMES = ("fsdp2-dp2", "fsdp2-tp2", "fsdp2-dp2-tp2")


class Steps(Noted):
    """By SGD, with numbers of its own; two models where it needs two."""

    numbers: list[float]

    def configure_model(self) -> None:
        if self.model is None:
            self.numbers = []
            self.model, self.other = tiny_llama(), tiny_llama(tied=False)
            self.change()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Masked(Steps):
    """Leaves small gradients out, as the error of shards tells."""

    def change(self) -> None:
        self.other = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradient in (parameter.grad for parameter in self.parameters()):
            gradient.masked_fill_(gradient.abs() < 1e-3, 0)  # type: ignore[union-attr]
        super().on_before_optimizer_step(optimizer)


class InTurn(Steps):
    """Two models that train against each other; the one that does not train is read in between."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        ids = batch[0]
        self.toggle_optimizer(first)
        mine = self.model(input_ids=ids, labels=ids)
        read = self.other(input_ids=(ids * 7 + 3) % 61).logits
        self._step(first, mine.loss + (mine.logits * read).mean())
        self.toggle_optimizer(second)
        read = self.model(input_ids=ids).logits
        self._step(
            second, self.other(input_ids=ids, labels=ids).loss + (self.other(input_ids=ids).logits * read).mean()
        )

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()  # calls on_before_optimizer_step
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(model.parameters(), lr=0.3) for model in (self.model, self.other)]


class ToggledLate(InTurn):
    """The same, with both models called when one of them is told not to train."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        ids = batch[0]
        loss = (self.model(input_ids=ids).logits * self.other(input_ids=(ids * 7 + 3) % 61).logits).mean()
        self.toggle_optimizer(first)
        self._step(first, loss)
        self.toggle_optimizer(second)
        self._step(second, self.other(input_ids=ids, labels=ids).loss)


class FakesUsedTwice(InTurn):
    """A judge trains on what the model says, and the model against it, by one forward pass: told not to train in the
    first backward pass, the model trains in the second.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        said = self.model(input_ids=batch[0], labels=batch[0])
        judged = self.other(inputs_embeds=said.logits.detach()[..., :HIDDEN]).logits
        losses = (said.loss + said.logits.square().mean(), judged.square().mean())
        for optimizer, loss in list(zip(optimizers, losses, strict=True))[::-1]:
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss)
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class MeanTeacher(Steps):
    """A copy that follows the model, by hand, behind each batch."""

    def change(self) -> None:
        self.other = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            taught = self.other(input_ids=batch[0]).logits
        output = self.model(input_ids=batch[0], labels=batch[0])
        return output.loss + 10 * (output.logits - taught).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), self.other.parameters(), strict=True):
                other.mul_(0.7)
                other.add_(mine, alpha=0.3)


class MomentumEncoder(MeanTeacher):
    """The same, by giving its parameters other data, as MoCo and BYOL do."""

    def on_train_batch_end(self, *args: Any) -> None:
        for mine, other in zip(self.model.parameters(), self.other.parameters(), strict=True):
            other.data = other.data * 0.7 + mine.data * 0.3


class Sharpened(Steps):
    """Reads its loss elsewhere behind each batch: weights go to a point along the gradient and back, as in SAM."""

    def change(self) -> None:
        self.other = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        before = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data + 10 * parameter.grad  # type: ignore[operator]
            parameter.grad.data = parameter.grad.data / 2  # type: ignore[union-attr]
        with torch.no_grad():
            loss = self.model(input_ids=torch.arange(12).view(2, 6), labels=torch.arange(12).view(2, 6)).loss
        self.numbers.append(float(loss))
        for parameter, data in zip(self.parameters(), before, strict=True):
            parameter.data = data


class Borrowed(Steps):
    """Uses weights outside of the model's forward pass, on samples, and in a penalty."""

    def change(self) -> None:
        self.other = None

    def loss(self, batch: list[Tensor]) -> Tensor:
        embedding, up = self.model.model.embed_tokens.weight, self.model.model.layers[0].mlp.up_proj.weight
        embedded, matrix = (p.full_tensor() if isinstance(p, DTensor) else p for p in (embedding, up))
        output = self.model(inputs_embeds=1.5 * functional.embedding(batch[0], embedded), labels=batch[0])
        return output.loss + (embedded[batch[0]] @ matrix.T).square().mean() + 0.1 * matrix.square().sum()


class SwitchedWithin(Steps):
    """Reads the model without what trains in the feed-forwards before each pass, as X-LoRA does, and with it then."""

    def change(self) -> None:
        self.other = None
        self.model.register_forward_pre_hook(self.read_before, with_kwargs=True)

    def read_before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for is_on in (False, True):
            for layer in model.model.layers:
                layer.mlp.requires_grad_(is_on)
            if not is_on:
                with torch.no_grad():
                    self.numbers.append(float(model.forward(kwargs["input_ids"][:1] * 0 + 1).logits.norm()))


class OwnNorms(Steps):
    """Reads numbers of its gradients and weights, and divides by one of them."""

    def change(self) -> None:
        self.other = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = sum(g.pow(2).sum() for g in gradients).item() ** 0.5  # type: ignore[union-attr]
        self.numbers += [
            norm,
            *(float(g.abs().max()) for g in gradients),
            *(p.mean().item() for p in self.parameters()),
        ]
        for gradient in gradients:
            gradient.div_(norm)


class Drawn(Steps):
    """Draws noise and dropout for its gradients, and some weights anew, on ranks whose generators differ."""

    def change(self) -> None:
        self.other = None

    def on_train_batch_start(self, *args: Any) -> None:
        torch.manual_seed(self.global_step + 100 * self.global_rank)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for gradient in (parameter.grad for parameter in self.parameters()):
            gradient.add_(torch.randn_like(gradient), alpha=1e-3)  # type: ignore[union-attr,arg-type]
            gradient.copy_(functional.dropout(gradient))  # type: ignore[union-attr,arg-type]
            gradient.mul_(torch.empty_like(gradient).bernoulli_(0.9))  # type: ignore[union-attr,arg-type]
        nn.init.orthogonal_(self.model.model.layers[1].mlp.up_proj.weight)
        self.model.model.norm.weight.data.normal_(1, 0.02)
        super().on_before_optimizer_step(optimizer)


class HookedLater(Steps):
    """A hook that runs in each micro-batch, when the gradient of that was added."""

    def change(self) -> None:
        self.other = None

    def on_fit_start(self) -> None:
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad / 2
            self.numbers.append(1.0)

        self.model.model.norm.weight.register_post_accumulate_grad_hook(halve)


class HookedEarly(HookedLater):
    """The same on what sharding replaces, before it."""

    def change(self) -> None:
        self.other = None
        super().on_fit_start()

    def on_fit_start(self) -> None:
        pass


class BehindEachBackward(Steps):
    """Changes gradients behind the backward pass of each micro-batch, in no way that a later one could make good."""

    def change(self) -> None:
        self.other = None

    def on_after_backward(self) -> None:
        for gradient in (parameter.grad for parameter in self.parameters()):
            assert gradient is not None
            gradient.clamp_(-1e-3, 1e-3)


class WithinEachBackward(BehindEachBackward):
    """The same, in a backward pass of its own."""

    def on_after_backward(self) -> None:
        pass

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()
        super().on_after_backward()


class Unfreezing(BaseFinetuning):
    """One block more in each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model.model.layers)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(module.model.model.layers[-epoch], optimizer, lr=0.1)


class Unfrozen(Steps):
    """Lightning's callback looks for parameters in the optimizer, by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other, self.numbers = tiny_llama(), None, []

    def configure_callbacks(self) -> Any:
        return [Unfreezing()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.3, momentum=0.9)


class Adversaries(Steps):
    """The loop of torch's tutorial: what one model made is read by the other, then trained against it, in one graph.

    Hooks of steps see the gradients of both.
    """

    automatic_optimization = False

    def change(self) -> None:
        pass

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        self.other.zero_grad()
        made = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states[-1]
        loss = self.other(inputs_embeds=made.detach(), labels=batch[0]).loss
        self.manual_backward(loss)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        second.step()
        self.model.zero_grad()
        self.manual_backward(-0.1 * self.other(inputs_embeds=made, labels=batch[0]).loss)
        first.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (self.model, self.other)]


class ReadBeforeSteps(Steps):
    """Reads what the model says of other samples between the backward pass and the step."""

    automatic_optimization = False

    def change(self) -> None:
        self.other = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.manual_backward(loss)
        self.loss([batch[0].flip(1)])
        optimizer.step()
        optimizer.zero_grad()


class ReadInHooks(Steps):
    """Reads its loss wherever a hook may, and shrinks its weights behind that."""

    def change(self) -> None:
        self.other = None

    def read(self, *args: Any) -> None:
        loss = self.loss([self.trainer.train_dataloader.dataset.tensors[0][:2]])  # type: ignore[union-attr]
        self.numbers.append(float(loss))

    on_after_backward = on_train_batch_start = read  # type: ignore[assignment]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read()
        super().on_before_optimizer_step(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        self.read()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


class BetweenPasses(MeanTeacher):
    """Moves weights, lets the copy follow, and clears gradients in hooks before the backward pass."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_train_batch_end()
        self.numbers += [float(parameter.norm()) for parameter in self.model.parameters()]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def fitted(kind: type[Steps], layout: str | None, **options: Any) -> dict[str, Any]:
    chosen = LAYOUTS[layout] if layout else None
    module = kind()
    automatic = kind.automatic_optimization
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} if automatic else {}
    strategy, size = (chosen.make(**options), chosen.data_size) if chosen else ("auto", 1)
    make_trainer(strategy, max_epochs=2, **arguments).fit(module, batches(size))
    return {
        "losses": module.losses,
        "gradients": module.gradients,
        "numbers": module.numbers,
        "parameters": whole_parameters(module),
    }


KINDS = (
    Masked,
    InTurn,
    ToggledLate,
    FakesUsedTwice,
    MeanTeacher,
    MomentumEncoder,
    Sharpened,
    Borrowed,
    OwnNorms,
    Drawn,
    HookedLater,
    HookedEarly,
    BehindEachBackward,
    WithinEachBackward,
    Adversaries,
    ReadBeforeSteps,
    ReadInHooks,
    BetweenPasses,
    Unfrozen,
    SwitchedWithin,
)
FAST = [
    *((kind, "fsdp2-dp2") for kind in (InTurn, FakesUsedTwice, MeanTeacher, HookedEarly, Adversaries, ReadInHooks)),
    (SwitchedWithin, "fsdp2-dp2"),
    *((kind, "fsdp2-tp2") for kind in (HookedEarly, Sharpened, Unfrozen)),
]
ALL = [(kind, layout) for kind in KINDS for layout in LAYOUT_NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(ALL, *(case for case in ALL if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Steps], layout: str, nursery: Nursery) -> None:
    compare(nursery, kind, layout)


@pytest.mark.parametrize("is_static", with_long([False, True], False))
def test_models_train_in_turn_as_replicas(is_static: bool, nursery: Nursery) -> None:
    compare(nursery, InTurn, "ddp-2", config=DDPConfig(static_graph=is_static))


def compare(nursery: Nursery, kind: type[Steps], layout: str, **options: Any) -> None:
    one = Pool(nursery, 1).run(fitted, kind, None, trainer=True)[0]
    for many in Pool(nursery, LAYOUTS[layout].ranks).run(fitted, kind, layout, trainer=True, **options):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["numbers"] == pytest.approx(one["numbers"], rel=1e-4, abs=1e-6)
        for expected, found in zip(one["gradients"], many["gradients"], strict=True):
            assert expected.keys() == found.keys()
            check_gradients(expected, found)
        for name, value in one["parameters"].items():
            torch.testing.assert_close(many["parameters"][name], value, rtol=1e-4, atol=1e-5)


# ---- what is refused of data that a parameter is given ---------------------------------------------------------------


def refuse_data() -> list[str]:
    module = Recorder()
    make_trainer({"dp_shard": 2}, max_steps=1).fit(module, batches(2))
    parameter = module.model.model.norm.weight
    found = []
    for value in (torch.zeros(HIDDEN), parameter.data[:3]):
        with pytest.raises((TypeError, ValueError), match=r"tensor\.data = value") as caught:
            parameter.data = value
        found.append(str(caught.value))
    parameter.data = parameter.data.double()
    with pytest.raises(ValueError, match="precision of the trainer"):
        module.model(input_ids=torch.zeros(1, 6, dtype=torch.long))
    return found


def test_data_that_does_not_fit_is_refused(pool2: Pool) -> None:
    for plain, short in pool2.run(refuse_data, trainer=True):
        assert "distribute_tensor(value" in plain
        assert f"({HIDDEN},), and value has (3,)" in short


def give_to_a_block() -> list[float]:
    module = Recorder()
    make_trainer({"dp_shard": 2}, max_steps=1).fit(module, batches(2))
    decoder = module.model.model
    block, x = decoder.layers[0], torch.randn(1, 6, HIDDEN)
    rotation = decoder.rotary_emb(x, torch.arange(6)[None])
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(float((block(x, position_embeddings=rotation) - x).norm()))
            for projection in (block.self_attn.o_proj, block.mlp.down_proj):
                projection.weight.data = projection.weight.data * 0
    return found


def test_a_block_that_is_called_alone_has_its_data(pool2: Pool) -> None:
    for before, after in pool2.run(give_to_a_block, trainer=True):
        assert after == 0 < before


# ---- what is said ----------------------------------------------------------------------------------------------------


class FrozenRows(Noted):
    """Trains new tokens only: one way that one process has, which is lost on shards, and one that is not."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.model.model.embed_tokens.weight.grad
        gradient[:30].zero_()
        mask = (torch.arange(VOCABULARY) >= 30).float().unsqueeze(1).expand(gradient.shape).contiguous()
        gradient.mul_(distribute_tensor(mask, gradient.device_mesh, gradient.placements, src_data_rank=None))
        super().on_before_optimizer_step(optimizer)


def of_frozen_rows() -> tuple[list[str], float]:
    """Runs on each rank: what is said, and the norm of gradients of rows that do not train."""
    module = FrozenRows()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer({"dp_shard": 2}, max_epochs=1).fit(module, batches(2))
    said = [str(warning.message) for warning in caught if "is a copy" in str(warning.message)]
    return said, float(module.gradients[0]["model.model.embed_tokens.weight"][:30].norm())


def test_a_slice_that_is_a_copy_is_named(pool2: Pool) -> None:
    ranks = pool2.run(of_frozen_rows, trainer=True)
    (said,) = ranks[0][0]
    assert said.startswith("aten.slice.Tensor of a sharded tensor is a copy of what all ranks hold")
    assert [norm for _, norm in ranks] == [0, 0]


# ---- what is refused -------------------------------------------------------------------------------------------------


class HookedInTheRun(Noted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.losses:
            self.hook(self.model.model.norm.weight)

    def hook(self, parameter: Any) -> None:
        parameter.register_hook(lambda gradient: gradient / 2)


class HookedAfterAccumulation(HookedInTheRun):
    def hook(self, parameter: Any) -> None:
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)


class Flagged(Noted):
    """Freezes a model by its optimizer's shards while copies of them wait for a backward pass."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        (group,) = self.optimizers().param_groups  # type: ignore[union-attr]
        self.loss(batch)
        for parameter in group["params"]:
            parameter.requires_grad = False
        self.loss(batch)


def refusal(kind: type[Recorder]) -> str:
    accumulated = 2 if kind.automatic_optimization else 1
    with pytest.raises(ValueError, match=r"hook|requires_grad") as caught:
        make_trainer({"dp_shard": 2}, max_epochs=1, accumulate_grad_batches=accumulated).fit(kind(), batches(2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (HookedInTheRun, "model.model.norm.weight has a hook (register_hook) that would never run"),
        (HookedAfterAccumulation, "register it before training begins"),
        (Flagged, "requires_grad of parameters of LlamaForCausalLM changed between"),
    ],
)
def test_what_one_process_would_do_otherwise_is_refused(kind: type[Recorder], found: str, pool2: Pool) -> None:
    assert all(found in message for message in pool2.run(refusal, kind, trainer=True))


class Keeping(nn.Module):
    """Keeps a value that its loss reads, and returns what is asked for."""

    def __init__(self, is_returned: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(LENGTH, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.is_returned = is_returned

    def forward(self, x: Tensor) -> Tensor | None:
        hidden = self.first(x)
        self.kept = self.second(hidden).square().mean() if self.is_returned else hidden.mean()
        return self.last(hidden) if self.is_returned else None


class KeepingMore(Keeping):
    """Of which the backward pass needs a matrix that is freed by then."""

    def forward(self, x: Tensor) -> None:
        self.kept = self.second(self.first(x)).square().mean()


class ReadsWhatIsKept(Noted):
    """Its loss is what a module of its own keeps."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        super().__init__()
        self.layers, self.model = make(*arguments), None

    def configure_model(self) -> None:
        pass

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.layers(batch[0].float())
        return self.layers.kept


class OutsideOfForward(Noted):
    """Embeds its tokens itself, by the parameter."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        embedded = functional.embedding(batch[0], self.model.get_input_embeddings().weight)
        return self.model(inputs_embeds=embedded, labels=batch[0]).loss


class Writing(nn.Module):
    """Keeps its weights in bounds, in its forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(LENGTH, 8), nn.Linear(8, 2), how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        with torch.no_grad():
            if self.how == "copy":
                weight.copy_(functional.normalize(weight, dim=-1))
            elif self.how == "data":
                weight.data.clamp_(-0.1, 0.1)
            else:
                weight.data = functional.normalize(weight.data, dim=-1)
        return self.last(self.first(x)).square().mean()


class WritesWeights(ReadsWhatIsKept):
    """Its layer changes its own weight before it uses it."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0].float())


class Flattening(Noted):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.parameters_to_vector([parameter.grad for parameter in self.parameters()])  # type: ignore[misc]


class Masking(Noted):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad[parameter.grad.abs() < 1e-3] = 0  # type: ignore[index,union-attr]


class Loading(Noted):
    """Takes other weights when the run begins."""

    def on_fit_start(self) -> None:
        self.model.load_state_dict(tiny_llama().state_dict())


class ChosenHeads(Noted):
    """Its rows choose the head."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.heads = tiny_llama(), nn.ModuleList(nn.Linear(HIDDEN, 2) for _ in range(2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states[-1]
        return self.heads[self.trainer.strategy.data_rank](hidden).square().mean()  # type: ignore[attr-defined]


class ReadsByItself(Noted):
    """Its ranks read the model for themselves, a number of times each, as in generation of several lengths."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        with torch.no_grad():
            for _ in range(1 + self.trainer.strategy.data_rank):  # type: ignore[attr-defined]
                self.model(input_ids=batch[0])


def read_by_replicas() -> int:
    make_trainer({"dp_replicate": 2, "dp_shard": 1}, max_epochs=1).fit(ReadsByItself(), batches(2))
    return len(take_gathers().layers)


def test_replicas_may_read_each_for_itself(pool2: Pool) -> None:
    assert pool2.run(read_by_replicas, trainer=True) == [0, 0]  # nothing keeps a model behind its run


UNEXPECTED: list[tuple[Any, tuple[Any, ...], str]] = [
    (ReadsWhatIsKept, (Keeping, True), "has a gradient that was not reduced over the data ranks"),
    (ReadsWhatIsKept, (Keeping, False), "has a gradient that was not reduced over the data ranks"),
    (ReadsWhatIsKept, (KeepingMore, False), "return from it all that the loss reads"),
    *((WritesWeights, (Writing, how), "writes into its parameter last.weight") for how in ("copy", "data", "given")),
    (OutsideOfForward, (), r"embedding\.weight\.full_tensor"),
    (ChosenHeads, (), "rank 0 called heads.0, rank 1 called heads.1"),
    (Flattening, (), r"flatten tensor\.full_tensor"),
    (Loading, (), "^load_state_dict was given whole tensors .* load them in __init__ or configure_model"),
]


BY_MASK = (Masking, (), r"^shards do not take values by a mask.* use tensor\.masked_fill_")


def meet_shards() -> None:
    for kind, arguments, message in [*UNEXPECTED, *([] if SHARDS_TAKE_MASKS else [BY_MASK])]:
        with pytest.raises((ValueError, RuntimeError), match=message):
            make_trainer({"dp_shard": 2}, max_epochs=1, accumulate_grad_batches=2).fit(kind(*arguments), batches(2))


def test_what_meets_shards_is_told_what_to_do(pool2: Pool) -> None:
    pool2.run(meet_shards, trainer=True)


def load_into_rows() -> None:
    with pytest.raises(RuntimeError, match=r"^load_state_dict was given whole tensors"):
        make_trainer(LAYOUTS["megatron3-dp2"].make(), max_epochs=1).fit(Loading(), batches(2))


def test_whole_tensors_for_rows_are_told_where_to_go(pool2: Pool) -> None:
    pool2.run(load_into_rows, trainer=True)


class WritesPlanned(Noted):
    """Its feed-forward bounds a weight that tensor parallelism cuts, its head one that is whole."""

    def __init__(self, how: str, *, planned: bool) -> None:
        super().__init__()
        self.head, self.how, self.planned = Writing(how), how, planned

    def loss(self, batch: list[Tensor]) -> Tensor:
        if not self.planned:
            return self.head(self.model(batch[0]).logits[..., :LENGTH])
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_model(self) -> None:
        super().configure_model()
        if self.planned:
            layer = self.model.model.layers[0].mlp
            layer.register_forward_pre_hook(lambda mlp, args: write(mlp.up_proj.weight, self.how))


def write(weight: Any, how: str) -> None:
    with torch.no_grad():
        if how == "copy":
            weight.copy_(functional.normalize(weight, dim=-1))
        elif how == "data":
            weight.data.div_(weight.data.norm(dim=-1, keepdim=True))
        else:
            weight.data = functional.normalize(weight.data, dim=-1)


def meet_slices() -> None:
    for how in ("copy", "data", "given"):
        with pytest.raises((ValueError, RuntimeError), match=r"writes into (its|a) parameter"):
            make_trainer({"tp": 2}, max_epochs=1).fit(WritesPlanned(how, planned=True), batches(2))
    with pytest.raises(ValueError, match=r"of Writing writes into its parameter last\.weight, in the place of which"):
        make_trainer({"tp": 2}, max_epochs=1).fit(WritesPlanned("given", planned=False), batches(2))


def test_writes_into_slices_are_refused(pool2: Pool) -> None:
    pool2.run(meet_slices, trainer=True)


def write_whole(layout: Any, how: str) -> dict[str, Tensor]:
    module = WritesPlanned(how, planned=False)
    make_trainer(layout, max_epochs=1).fit(module, batches(2))
    return whole_parameters(module)


@pytest.mark.slow
def test_writes_into_whole_parameters_arrive(nursery: Nursery, pool2: Pool) -> None:
    alone = Pool(nursery, 1)
    for how in ("copy", "data"):
        (expected,) = alone.run(write_whole, "auto", how, trainer=True)
        for found in pool2.run(write_whole, {"tp": 2}, how, trainer=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # AdamW makes much of a last bit
