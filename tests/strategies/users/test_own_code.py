"""What users do to a model beside training it: hooks, second names, shared parameters, attention maps."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModel, AutoModelForCausalLM

from lightning_automodel import DDPStrategy, FSDP2Config
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import HIDDEN, Recorder, batches, make_trainer, tiny_llama, whole, world_size

BOUND = 1e-4
SIZES = [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2}]


class Noted(Recorder):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_config(tiny_llama().config, attn_implementation="eager")
            self.model.load_state_dict(tiny_llama().state_dict())
            self.change()

    def change(self) -> None:
        """What the user does to the model."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})


class Attentions(Noted):
    """Its loss reads the attention maps, of each head another part."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0], output_attentions=True)
        heads = torch.arange(1.0, 3.0).view(1, -1, 1, 1)
        return output.loss + sum((heads * a * a.detach().cumsum(-1)).square().sum(-1).mean() for a in output.attentions)


class Hooked(Noted):
    """Its loss reads what hooks saw of whole layers."""

    def change(self) -> None:
        self.seen: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, output: self.seen.append(output))
            layer.self_attn.register_forward_hook(lambda module, args, output: self.seen.append(output[0]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.seen.clear()
        return super().loss(batch) + 100 * sum(x.square().mean() for x in self.seen)


class HookedInputs(Hooked):
    """Hooks go on with what enters whole layers, beside what leaves; others change its gradients."""

    def change(self) -> None:
        self.seen: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, args: self.seen.append(args[0]))
            layer.mlp.register_forward_hook(lambda module, args, output: output + 0.3 * torch.tanh(args[0]))
            layer.mlp.register_full_backward_hook(lambda module, entered, left: tuple(0.5 * x for x in entered))
            layer.self_attn.register_forward_hook(gate_by_input, with_kwargs=True)


def gate_by_input(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> tuple:
    return (output[0] * torch.sigmoid(kwargs["hidden_states"]), *output[1:])


class SecondNames(Noted):
    """Parts of the model under names of their own, before and after the model's."""

    def configure_model(self) -> None:
        if self.model is None:
            model = tiny_llama()
            self.backbone = model.model
            self.model, self.head = model, model.lm_head


class Gathered(Noted):
    """A loss over the samples of all data ranks, whose gradients cross ranks."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        features = self.model(input_ids=batch[0], output_hidden_states=True).hidden_states[-1].mean(1)
        every, numbers = features, batch[0][:, 0] * 100 + batch[0][:, 1]
        if self.trainer.world_size > 1:
            every = self.all_gather(features, sync_grads=True).reshape(-1, HIDDEN)
            numbers = self.all_gather(numbers).flatten()
        every = every[numbers.argsort()]
        return functional.cross_entropy(every @ every.T, torch.arange(len(every)))


class States(Noted):
    """Its loss reads all hidden states, of each token what came before it."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0], output_hidden_states=True)
        states = self.model(input_ids=batch[0], output_hidden_states=True, return_dict=False)[-1]
        return output.loss + sum(x.cumsum(1).square().mean() for x in (*output.hidden_states, *states))


class Backbone(Noted):
    """A model without a head, which is itself what is sharded, and what it records on the way."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModel.from_config(tiny_llama().config, attn_implementation="eager")
            self.model.load_state_dict(tiny_llama().model.state_dict())

    def loss(self, batch: list[Tensor]) -> Tensor:
        output = self.model(input_ids=batch[0], output_hidden_states=True, output_attentions=True)
        recorded = (*output.hidden_states, *output.attentions)
        return sum(100 * (x * x.detach().cumsum(1)).square().mean() for x in recorded)


CASES = [Backbone, Attentions, Hooked, HookedInputs, SecondNames, Gathered]


def gradients_of(kind: type[Noted], sizes: dict[str, Any]) -> list[dict[str, Tensor]]:
    module = kind()
    run = make_trainer(dict(sizes), max_epochs=1, accumulate_grad_batches=2)
    run.fit(module, batches(sizes.get("dp_shard", 1)))
    return module.gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    with_long(
        [(kind, sizes) for kind in CASES for sizes in SIZES],
        *[(kind, sizes) for kind in CASES for sizes in SIZES if sizes != {"tp": 2}],
    ),
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_gradients_are_those_of_one_process(kind: type[Noted], sizes: dict[str, int], nursery: Nursery) -> None:
    expected = Pool(nursery, 1).run(gradients_of, kind, {}, trainer=True)[0]
    ranks = sizes.get("dp_shard", 1) * sizes.get("tp", 1) * sizes.get("cp", 1)
    actual = Pool(nursery, ranks).run(gradients_of, kind, sizes, trainer=True)[0]
    for one, many in zip(expected, actual, strict=True):
        assert one.keys() == many.keys()
        check_gradients(one, many)


def test_hidden_states_of_a_stream_that_is_cut(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients_of, States, {}, trainer=True)
    cut = {"tp": 2, "config": FSDP2Config(sequence_parallel=True)}
    for actual in pool2.run(gradients_of, States, cut, trainer=True):
        for one, many in zip(expected, actual, strict=True):
            check_gradients(one, many)


def check_gradients(one: dict[str, Tensor], many: dict[str, Tensor]) -> None:
    """Rounding counts little where a gradient is small beside all of them."""
    least = 0.01 * torch.stack([gradient.norm() for gradient in one.values()]).norm()
    for name, gradient in one.items():
        assert (many[name] - gradient).norm() <= BOUND * torch.maximum(gradient.norm(), least), name


# ---- what is refused -------------------------------------------------------------------------------------------------


class Shared(Noted):
    """Two models with one embedding."""

    def change(self) -> None:
        self.other = tiny_llama(tied=False)
        self.other.model.embed_tokens.weight = self.model.model.embed_tokens.weight

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.other(input_ids=batch[0], labels=batch[0]).loss


class HookedGradient(Noted):
    """Trains the embedding at half the rate of all else."""

    def change(self) -> None:
        self.model.model.embed_tokens.weight.register_hook(lambda gradient: gradient / 2)


class HookedLater(Noted):
    def on_fit_start(self) -> None:
        self.model.model.embed_tokens.weight.register_hook(lambda gradient: gradient / 2)


def refuse(kind: type[Noted], sizes: dict[str, int]) -> str:
    with pytest.raises(ValueError, match="DDPStrategy") as caught:
        make_trainer(dict(sizes), max_epochs=1).fit(kind(), batches(sizes.get("dp_shard", 1)))
    return str(caught.value)


@pytest.mark.parametrize("kind", [Shared, HookedGradient, HookedLater])
@pytest.mark.parametrize("sizes", SIZES[:2], ids="-".join)
def test_what_would_train_other_weights_is_refused(kind: type[Noted], sizes: dict[str, int], pool2: Pool) -> None:
    found = pool2.run(refuse, kind, sizes, trainer=True)[0]
    if kind is Shared:
        assert "other.model.embed_tokens.weight is model.model.embed_tokens.weight" in found
    else:
        assert "model.model.embed_tokens.weight has a hook" in found


class OtherTensors(Noted):
    """Calls its model with other tensors in the place of some parameters."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        up = self.model.model.layers[0].mlp.up_proj.weight
        other = {"model.layers.0.mlp.up_proj.weight": 2 * whole(up)}
        return torch.func.functional_call(self.model, other, (), {"input_ids": batch[0], "labels": batch[0]}).loss


class OtherShards(OtherTensors):
    def loss(self, batch: list[Tensor]) -> Tensor:
        other = {name: 2 * parameter for name, parameter in self.model.named_parameters() if "up_proj" in name}
        return torch.func.functional_call(self.model, other, (), {"input_ids": batch[0], "labels": batch[0]}).loss


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(OtherTensors, {"tp": 2}), (OtherShards, {"dp_shard": 2})],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_other_tensors_in_the_place_of_shards_are_refused(
    kind: type[Noted], sizes: dict[str, int], pool2: Pool
) -> None:
    for found in pool2.run(refuse, kind, sizes, trainer=True):
        assert "is called with another tensor in the place of its parameter" in found
        assert "mlp.up_proj.weight" in found


def gradients_of_replicas(kind: type[Noted]) -> list[dict[str, Tensor]]:
    module = kind()
    make_trainer(DDPStrategy(), max_epochs=1, accumulate_grad_batches=2).fit(module, batches(world_size()))
    return module.gradients


@pytest.mark.parametrize("kind", [Shared, HookedGradient, HookedLater])
def test_ddp_trains_it(kind: type[Noted], nursery: Nursery, pool2: Pool) -> None:
    expected, actual = (p.run(gradients_of_replicas, kind, trainer=True)[0] for p in (Pool(nursery, 1), pool2))
    for one, many in zip(expected, actual, strict=True):
        check_gradients(one, many)


def test_shards_of_tensor_parallelism_may_be_others(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients_of_replicas, OtherShards, trainer=True)
    for actual in pool2.run(gradients_of, OtherShards, {"tp": 2}, trainer=True):
        for one, many in zip(expected, actual, strict=True):
            check_gradients(one, many)


# ---- what is said ----------------------------------------------------------------------------------------------------


class HookedInside(Noted):
    """Hooks where tensor parallelism splits values, and one where it does not."""

    def change(self) -> None:
        for module in (self.model.model.norm, *(layer.mlp.up_proj for layer in self.model.model.layers)):
            module.register_forward_hook(lambda module, args, output: None)


class HookedInsideLater(HookedInside):
    """The same, and backward hooks of a layer, inside and as a whole, and of a block, when the model is parallel."""

    def change(self) -> None:
        pass

    def on_fit_start(self) -> None:
        HookedInside.change(self)
        mlp = self.model.model.layers[0].mlp
        for module in (mlp.up_proj, mlp, self.model.model.layers[1]):
            module.register_full_backward_hook(lambda module, entered, left: None)


class HookedAround(Noted):
    """Hooks that have the name of torch's own, of all modules, and on the gradients of what enters the head."""

    def change(self) -> None:
        hook = functools.wraps(nn.Linear.forward)(lambda module, args, output: None)
        self.model.model.layers[1].mlp.up_proj.register_forward_hook(hook)

    def on_fit_start(self) -> None:
        self.model.lm_head.register_full_backward_hook(lambda module, entered, left: None)
        self.handle = register_module_forward_hook(lambda module, args, output: None)

    def on_fit_end(self) -> None:
        self.handle.remove()


def warnings_of(kind: type[nn.Module]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer({"tp": 2}, max_steps=1).fit(kind(), batches(1))
    return [str(warning.message) for warning in caught if "hook of yours" in str(warning.message)]


def test_hooks_that_see_a_part_are_named(pool2: Pool) -> None:
    (found,) = pool2.run(warnings_of, HookedInside, trainer=True)[0]
    assert found.startswith("model.layers.0.mlp.up_proj and 1 more: a forward hook of yours")
    assert pool2.run(warnings_of, Hooked, trainer=True)[0] == []
    forward, backward = pool2.run(warnings_of, HookedInsideLater, trainer=True)[0]
    assert forward == found
    assert backward.startswith("model.layers.0.mlp.up_proj: a backward hook of yours will see a rank's part of")
    said = {message.partition(" hook of yours")[0] for message in pool2.run(warnings_of, HookedAround, trainer=True)[0]}
    all_modules = "a hook of all modules (torch.nn.modules.module.register_module_...) and 1 more: a forward"
    assert said == {"model.layers.1.mlp.up_proj: a forward", "lm_head: a backward", all_modules}
