"""Where values of split layers of users come from: draws of their heads, lists that graphs write into, and losses of
what no layer has given.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import megatron_fsdp_strategy_parallelize, parallelize
from lightning_automodel.testing.pool import Pool
from tests.exactness import test_beside
from tests.exactness.test_beside import (
    BOUND,
    LEVERS,
    PLAN,
    SCHEDULE,
    SLOPES,
    Attention,
    Model,
    Sloped,
    WithSlopes,
    build,
)
from tests.support import cuda_on_cpu
from tests.support.comparison import batches, compare
from tests.support.training import Recorder, make_trainer, tiny_llama
from tests.support.training import batches as training_batches


class Drawing(Attention):
    """Scales its values by random numbers of a rank's heads, and by some for each row and head."""

    def forward(self, x: Tensor, first: Any, rotary: Any) -> tuple:
        rows, heads = x.shape[0], self.v(x).shape[-1] // test_beside.HEAD
        chances = torch.full((rows * heads, 1), 0.7)
        drawn = torch.rand(heads, 1, 1) + torch.bernoulli(chances).view(rows, heads, 1, 1)
        mixed, value, size = super().forward(x, drawn if first is None else first * drawn, rotary)
        return mixed, value if first is None else first, size


class AppendingToWhole(Attention):
    """Puts its values into a list that has whole ones."""

    def forward(self, x: Tensor, first: Any, rotary: Any) -> tuple:
        whole, *others = first
        mixed, _, size = super().forward(x, (others[-1] if others else 1) * whole[:, None], rotary)
        first.append(self.v(x).unflatten(-1, (-1, test_beside.HEAD)).transpose(1, 2))
        return mixed, first, size


class WithWhole(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = nn.Parameter(torch.rand(1, 1, test_beside.HEAD))

    def first(self) -> list:
        self.given = [self.scale * 1]
        return self.given

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        output = super().forward(input_ids, labels)
        assert len(self.given) == 1 + len(self.blocks)
        return output


class Hooked(Model):
    """Has a loss of what a hook sees in a split layer, which comes and goes in the forward pass."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        seen: list[Tensor] = []
        handle = self.blocks[0].attention.q.register_forward_hook(lambda q, args, output: seen.append(output))
        loss = super().forward(input_ids, labels).loss
        handle.remove()
        return SimpleNamespace(loss=loss + seen[0].square().mean())


class Decayed(WithSlopes):
    """Has a loss of a parameter of its own."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(input_ids, labels).loss + self.slopes.square().sum())


SEEN_BY_HOOKS: dict[tuple[str, str], tuple[Callable[[Any], Any], str]] = {
    ("layers of users", "blocks.0.attention"): (lambda output: output[1], "returns beside its first output"),
    ("layers of users", "blocks.0.attention.q"): (lambda output: output, "a loss reads what is computed inside of"),
    ("llama", "model.layers.0.mlp.act_fn"): (lambda output: output, "a loss reads what is computed inside of"),
    ("llama", "model.layers.0.self_attn.v_proj"): (lambda output: output, "a loss reads what is computed inside of"),
    ("llama whose loss is a graph", "model.layers.0.mlp.act_fn"): (lambda output: output, "is computed inside of"),
    ("cut llama", "model.layers.0"): (lambda output: output, "has a slice of the sequence there"),
    ("cut llama", "model.layers.1.input_layernorm"): (lambda output: output, "has a slice of the sequence there"),
    ("cut llama of trained norms", "model.layers.0.input_layernorm"): (
        lambda output: output,
        "has a slice of the sequence there",
    ),
}


class Penalized(Recorder):
    """Has a loss, in its training step, of what a hook has collected."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.kind, self.name, self.seen = kind, name, []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(Attention) if self.kind == "layers of users" else tiny_llama()
            choose = SEEN_BY_HOOKS[self.kind, self.name][0]
            hook = lambda module, args, output: self.seen.append(choose(output))  # noqa: E731
            self.model.get_submodule(self.name).register_forward_hook(hook)
            if "norms" in self.kind:  # nothing that enters the first block has a gradient
                for name, parameter in self.model.named_parameters():
                    parameter.requires_grad_("norm" in name)

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        if "graph" in self.kind:
            loss = torch.compile(torch.sqrt, backend="aot_eager")(loss)
        return loss + self.seen.pop().square().mean()


def fit_with_penalty(kind: str, name: str) -> str:
    """Runs on each rank."""
    plan, is_cut = (PLAN if kind == "layers of users" else None), kind.startswith("cut llama")
    config = FSDP2Config(tp_plan=plan, sequence_parallel=is_cut)
    trainer = make_trainer({"tp": 2, "config": config}, max_epochs=1)
    with pytest.raises(ValueError, match=SEEN_BY_HOOKS[kind, name][1]) as caught:
        trainer.fit(Penalized(kind, name), training_batches(1))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), SEEN_BY_HOOKS)
def test_losses_outside_of_the_model_of_what_hooks_see_are_refused(kind: str, name: str, pool2: Pool) -> None:
    for said in pool2.run(fit_with_penalty, kind, name):
        assert name.partition(".input_layernorm")[0].rpartition(".")[0] in said


class Watched(Model):
    """Has a loss of what hooks of a user see leave whole layers and blocks, beside the first output, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks[0].ffn.register_forward_hook(lambda ffn, args, output: ffn.seen.extend([output[0], output[1][1]]))
        self.blocks[1].register_forward_hook(lambda block, args, output: block.seen.extend([output[0], output[2]]))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        seen: list[Tensor] = []
        self.blocks[0].ffn.seen = self.blocks[1].seen = seen
        loss = super().forward(input_ids, labels).loss
        return SimpleNamespace(loss=loss + sum(value.square().mean() for value in seen))


def error_of(kind: type[Attention], model: type[Model], **lever: Any) -> tuple[float, str]:
    """Runs on each rank."""
    make = partial(build, kind, model=model)
    return compare(make, {"tp": 2}, 2, SCHEDULE, FSDP2Config(tp_plan=PLAN, **lever)).largest


def test_draws_for_as_many_heads_as_rows_have_parts_are_exact(pool2: Pool) -> None:
    for error in pool2.run(error_of, Drawing, Model):
        assert error[0] <= BOUND, error


@pytest.mark.parametrize("lever", LEVERS[:3], ids=str)
def test_hooks_see_whole_values_beside_the_first_output(lever: dict[str, Any], pool2: Pool) -> None:
    for error in pool2.run(error_of, Attention, Watched, **lever):
        assert error[0] <= BOUND, error


@pytest.mark.slow
def test_graphs_write_into_lists_of_whole_values(pool2: Pool) -> None:
    for error in pool2.run(error_of, AppendingToWhole, WithWhole, **LEVERS[-1]):
        assert error[0] <= BOUND, error


def read(model: type[Model], **lever: Any) -> str:
    """Runs on each rank."""
    config = FSDP2Config(tp_plan=PLAN | {"slopes": "colwise"}, **lever)
    split = parallelize(build(Attention, model=model), build_mesh(resolve_sizes(2, tp=2), "cpu"), config)
    with pytest.raises(ValueError, match="a loss reads") as caught:
        split.train()(**batches(SCHEDULE, 0, 0)[0]).loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("lever", LEVERS[:3], ids=str)
def test_losses_of_what_no_layer_gives_are_refused(lever: dict[str, Any], pool2: Pool) -> None:
    for said in pool2.run(read, Hooked, **lever):
        assert "a loss reads what is computed inside of blocks.0.attention (Attention)" in said
    for said in pool2.run(read, Decayed, **lever):
        assert "a loss reads slopes" in said


MEGATRON = ((Sloped, Model, SLOPES[Sloped]), (Attention, WithSlopes, {"slopes": "colwise"}), (Attention, Model, {}))


def step_of_megatron() -> list[list[float]]:
    """Runs on each rank: changes of a whole parameter by a step of SGD, on one process and on two."""
    cuda_on_cpu.install()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    found = []
    for kind, model, rules in MEGATRON:
        changes: list[float] = []
        for stage in (None, 3):
            net: Any = build(kind, model=model)
            optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
            before = net.frequencies.detach().clone()
            if stage is not None:
                net, optimizer = megatron_fsdp_strategy_parallelize(
                    net,
                    mesh,
                    optimizer,
                    zero_dp_strategy=stage,
                    tp_shard_plan=PLAN | rules,
                    megatron_fsdp_unit_modules=["tests.exactness.test_beside.Block"],
                )
            net.train()(**batches(SCHEDULE, 0, 0)[0]).loss.backward()
            optimizer.step()
            after = net.frequencies.detach()
            after = after.full_tensor() if isinstance(after, DTensor) else after
            changes += (after - before).tolist()
        found.append(changes)
    return found


@pytest.mark.slow
def test_megatron_fsdp_with_what_layers_hand_each_other(pool2: Pool) -> None:
    for found in pool2.run(step_of_megatron):
        for changes in found:
            one, other = torch.tensor(changes).chunk(2)
            assert (other - one).norm() <= 1e-4 * one.norm(), changes
