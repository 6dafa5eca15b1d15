"""Trains one tiny model twice, on one process and on a mesh, and compares everything that a step produces."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.random_numbers import RandomNumbers
from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.mesh import DP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallel.draws.passes import draw_from
from lightning_automodel.parallel.fsdp2.running import gradients_held
from lightning_automodel.parallel.tensor.origins import refuse_loss_of_slices
from lightning_automodel.parallelizer import parallelize
from tests.support.training import whole

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What both runs do: SGD, because it shows errors of scale that Adam hides."""

    steps: int = 3
    micro_batches: int = 2
    rows: int = 2
    length: int = 24
    clip: float | None = 0.5
    learning_rate: float = 0.1


@dataclass
class Differences:
    """Relative errors of the mesh against one process, the worst of all steps, by what was compared."""

    worst: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Relative error in the 2-norm; a tensor that should be zero counts with its own norm."""
        expected = expected.detach().double()
        error = (actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-12)
        value = error.item() if torch.isfinite(error) else float("inf")
        self.worst[name] = max(self.worst.get(name, 0.0), value)

    def add_gradients(self, actual: dict[str, Tensor], expected: dict[str, Tensor], norm: Tensor) -> None:
        """Relative error of every gradient; a missing one counts as zero.

        A gradient that is zero by construction (a key bias under softmax) is noise on one process too, small beside
        ``norm``, which is that of all ``expected`` ones.
        """
        noise = 1e-6 * norm.item()
        for name, gradient in expected.items():
            found = actual.get(name)
            if found is None:
                found = torch.zeros_like(gradient)
            if max(gradient.norm().item(), found.norm().item()) > noise:
                self.add(f"gradient of {name}", found, gradient)
        for name in actual.keys() - expected.keys():
            self.add(f"gradient of {name}", actual[name] + 1, torch.ones_like(actual[name]))

    @property
    def largest(self) -> tuple[float, str]:
        """The largest error and what has it."""
        return max(((error, name) for name, error in self.worst.items()), default=(0.0, ""))


def compare(
    build: Callable[[], nn.Module],
    sizes: dict[str, int],
    world: int,
    schedule: Schedule | None = None,
    config: FSDP2Config | None = None,
    make_parallel: Callable[[nn.Module, Any], nn.Module] | None = None,
    draw: Callable[[Schedule, int, int], list[Batch]] | None = None,
    device: str = "cpu",
) -> Differences:
    """Runs on every rank of an initialized process group; each rank computes the reference for itself.

    Args:
        build: draws the model (the same on every rank); its vocabulary is at least 128.
        sizes: of the mesh.
        world: number of ranks.
        schedule: steps, micro-batches, clipping.
        config: switches of the mesh's run.
        draw: ``(schedule, step, data rank)`` to micro-batches; random text unless given.
        make_parallel: instead of ``parallelize(copy of the model, mesh, config)``.
        device: type of the devices that both compute on.
    """
    schedule = schedule or Schedule()
    mesh = build_mesh(resolve_sizes(world, **sizes), device)
    reference = build().train().to(device)
    model = copy.deepcopy(reference)
    model = make_parallel(model, mesh) if make_parallel else parallelize(model, mesh, config)
    model.train()
    data = axis(mesh, DP)
    draw = draw or batches
    defer = config is None or config.defer_fsdp_grad_sync
    expected = _train(reference, schedule, list(range(data.size())), draw)
    actual = _train(model, schedule, [data.get_local_rank()], draw, defer)
    return _differences(expected, actual, mesh)


def batches(schedule: Schedule, step: int, data_rank: int, vocabulary: int = 128) -> list[Batch]:
    """The micro-batches of a step on one data rank."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    shape = (schedule.rows, schedule.length)
    ids = [torch.randint(3, vocabulary, shape, generator=generator) for _ in range(schedule.micro_batches)]
    return [{"input_ids": x, "labels": x} for x in ids]


@dataclass
class _Step:
    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _train(model: nn.Module, schedule: Schedule, ranks: list[int], draw: Callable, defer: bool = True) -> list[_Step]:
    """One process takes the batches of all data ranks; a rank of the mesh takes its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=schedule.learning_rate)
    device = next(model.parameters()).device
    numbers = RandomNumbers(seed=0)
    draw_from(model, numbers)
    steps = []
    for step in range(schedule.steps):
        micro = [(rank, _to(device, batch)) for rank in ranks for batch in draw(schedule, step, rank)]
        total = torch.zeros((), device=device)
        for i, (rank, batch) in enumerate(micro):
            numbers.data_rank = rank
            numbers.begin("train", step, i % schedule.micro_batches)
            with gradients_held(model, defer) if i < len(micro) - 1 else nullcontext():
                loss = loss_of(model, batch) / len(micro)
                refuse_loss_of_slices(loss)  # as strategies do
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), schedule.clip or float("inf"))
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        steps.append(_Step(total, norm, gradients, {n: whole(p) for n, p in model.named_parameters()}))
    return steps


def _to(device: torch.device, batch: Batch) -> Batch:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss; where it has none, that of its logits as guesses of the labels in the same place."""
    output = model(**batch)
    if output.loss is not None:
        return output.loss
    length = min(output.logits.shape[1], batch["labels"].shape[1])
    return functional.cross_entropy(output.logits[:, :length].flatten(0, 1), batch["labels"][:, :length].flatten())


def _differences(expected: list[_Step], actual: list[_Step], mesh: Any) -> Differences:
    differences = Differences()
    data = axis(mesh, DP)
    for one, many in zip(expected, actual, strict=True):
        loss = many.loss.clone()
        torch.distributed.all_reduce(loss, group=data.get_group())
        differences.add("loss", loss / data.size(), one.loss)
        differences.add("gradient norm", many.norm, one.norm)
        differences.add_gradients(many.gradients, one.gradients, one.norm)
    for name, value in expected[-1].parameters.items():
        differences.add(f"parameter {name}", actual[-1].parameters[name], value)
    return differences
