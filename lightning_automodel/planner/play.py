"""Plays one rank of a run in this process: the real stages and a real step, on tensors without memory."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_automodel._compat.fake.ranks import fake_device, fake_world
from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import MeshSizes, build_mesh
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.planner.experts import dispatch_evenly
from lightning_automodel.planner.optimizers import MakesOptimizer, adamw
from lightning_automodel.planner.step import prepare, watched_step
from lightning_automodel.planner.watch import Watched
from lightning_automodel.strategies.precision import FSDP2Precision


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of ``FSDP2TPStrategy``, as far as it decides about memory, communication and time.

    Attributes:
        sizes: of the mesh.
        config: the switches of the strategy.
        sequence_length: tokens of a row.
        micro_batch: rows that a data rank computes at a time.
        accumulation: micro-batches of an optimizer step.
        precision: of the trainer.
        clips: whether gradients are clipped.
        optimizer: from parameters to an optimizer.
        device_type: "cuda", or "cpu" to compare with a real run there.
    """

    sizes: MeshSizes
    config: FSDP2Config
    sequence_length: int
    micro_batch: int = 1
    accumulation: int = 1
    precision: str = "bf16-mixed"
    clips: bool = True
    optimizer: MakesOptimizer = adamw
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a step must be at least 1")


@contextmanager
def stage(run: Run, rank: int = 0) -> Generator[DeviceMesh, None, None]:
    """Be ``rank`` of the run within this context: its mesh is there, and tensors have no memory."""
    with fake_world(run.sizes.world, rank):
        mesh = build_mesh(run.sizes, run.device_type)
        with fake_device(run.device_type):
            yield mesh


def play(model: nn.Module, run: Run, mesh: DeviceMesh, ends: int = 2, abridges: bool = True) -> Watched:
    """Make ``model`` parallel, and return what one step does, within :func:`stage`.

    Args:
        model: on the meta device; is changed.
        run: what is planned.
        mesh: from :func:`stage`.
        ends: blocks at both ends whose memory is told apart.
        abridges: whether few blocks of rows stand for all in the loss, with the same numbers.
    """
    return play_each(model, [run], mesh, ends, abridges)[0]


def play_each(
    model: nn.Module, runs: Sequence[Run], mesh: DeviceMesh, ends: int = 2, abridges: bool = True
) -> list[Watched]:
    """Make ``model`` parallel once, and return what one step of each of ``runs`` does; they differ in rows only.

    The other arguments are those of :func:`play`.
    """
    run = runs[0]
    precision = FSDP2Precision(run.precision)  # type: ignore[arg-type]
    config = replace(run.config, expert_dispatcher=dispatch_evenly) if run.sizes.ep > 1 else run.config
    parallelize(model, mesh, config, mp_policy=precision.mp_policy, param_dtype=precision.param_dtype)
    model.to_empty(device=run.device_type)
    model.train()
    optimizer = _optimizer(run, model)
    return [
        watched_step(
            model,
            optimizer,
            batch_of(each),
            mesh,
            accumulation=run.accumulation,
            clips=run.clips,
            defers=run.config.defer_fsdp_grad_sync,
            ends=ends,
            abridges=abridges,
        )
        for each in runs
    ]


def _optimizer(run: Run, model: nn.Module) -> Optimizer:
    """Make the optimizer of the run, as it is behind a first step.

    Raises:
        ValueError: if it is not for these parameters, or cannot take its step without values.
    """
    try:
        optimizer = run.optimizer(p for p in model.parameters() if p.requires_grad)
        prepare(model, optimizer)
    except Exception as error:  # whatever an optimizer raises
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"the optimizer cannot be planned ({reason}): it is not for these parameters, or its step wants values; "
            "plan with another one of as many states"
        ) from error
    return optimizer


def batch_of(run: Run) -> dict[str, Tensor]:
    """Make token ids and labels [micro_batch, sequence_length] on the device of the run."""
    ids = torch.zeros(run.micro_batch, run.sequence_length, dtype=torch.int64, device=run.device_type)
    return {"input_ids": ids, "labels": ids}
