"""Compares one family on a mesh with one process: what the ranks of the tests and of the benchmark do."""

import hashlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans import select_plan
from tests.support.adapted import with_adapter
from tests.support.comparison import Batch, Differences, Schedule, batches, compare, loss_of
from tests.support.families import tiny_model
from tests.support.files import Files
from tests.support.float64 import in_float64
from tests.support.images import Inputs, find_inputs
from tests.support.initialization import initial_difference
from tests.support.peers import by_transformers, compare_step
from tests.support.ragged import ragged

NO_EFFECT = "sequence_parallel=True has no effect"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layout with its schedule.

    Attributes:
        sizes: of the mesh.
        schedule: steps, micro-batches, clipping.
        changes: fields of the language model's config.
        config: switches of the mesh's run.
        ragged: an odd number of tokens, and padding.
        packed: three documents in each row, told apart by their positions, where the model takes positions.
        adapter: a method of ``tests/support/adapted.py``; empty: every parameter trains.
        by_transformers: its own tensor parallelism instead of ours; only loss and gradients of one step are compared.
        device: type of the devices that both compute on.
    """

    sizes: Mapping[str, int]
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=1, micro_batches=1, clip=None))
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: FSDP2Config = field(default_factory=FSDP2Config)
    ragged: bool = False
    packed: bool = False
    adapter: str = ""
    by_transformers: bool = False
    device: str = "cpu"

    @property
    def world(self) -> int:
        """Number of ranks."""
        world = 1
        for name, size in self.sizes.items():
            world *= 1 if name == "ep" else size
        return world


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of a run.

    Attributes:
        error: the largest relative error; ``inf`` where the run failed.
        where: what has it.
        failure: the error that ended the run.
        note: what the run said that it leaves undone.
    """

    error: float
    where: str = ""
    failure: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is known about a family before it runs on a mesh.

    Attributes:
        parameters: of the tiny model; 0: it cannot be built.
        plan: where its tensor-parallel plan comes from; empty: it has none.
        inputs: what it takes besides text.
        failure: why it cannot be built or run on one process.
    """

    parameters: int = 0
    plan: str = ""
    inputs: Inputs = field(default_factory=Inputs)
    failure: str = ""


def probe(family: str) -> Probe:
    """Builds the model on one process, finds its plan and its inputs, and runs it once."""
    try:
        model = tiny_model(family).train()
        inputs = find_inputs(model)
        loss_of(model, inputs.draw(torch.Generator().manual_seed(0), with_images=True)).backward()
    except Exception as error:  # whatever transformers raises is the reason that the table gives
        return Probe(failure=_describe(error))
    return Probe(parameters=sum(p.numel() for p in model.parameters()), plan=_plan(model), inputs=inputs)


def run_all(
    family: str, runs: Mapping[str, Run | None], inputs: Inputs, double: bool = False, directory: Path | None = None
) -> dict[str, Outcome]:
    """Runs on every rank: the outcome of each run by its name; ``None`` stands for the initial weights.

    Args:
        family: its model type.
        runs: all on as many ranks as there are.
        inputs: from :func:`probe`.
        double: compute in float64.
        directory: where models are saved, which both sides then read; ``None``: they start from one in memory.
    """
    outcomes = {}
    for name, run in runs.items():
        note = ""
        try:
            if run is None:
                error, where = initial_difference(family)
            else:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    error, where = differences(family, run, inputs, double, directory).largest
                note = next((str(w.message) for w in caught if NO_EFFECT in str(w.message)), "")
            outcomes[name] = Outcome(error=error, where=where, note=note)
        except Exception as failure:
            outcomes[name] = Outcome(error=float("inf"), failure=_describe(failure))
    return outcomes


def differences(
    family: str, run: Run, inputs: Inputs | None = None, double: bool = False, directory: Path | None = None
) -> Differences:
    """Runs on every rank: a family on a mesh against one process."""
    # Grouped matrix products of experts exist for narrow dtypes only.
    build: Callable[[], nn.Module] = partial(tiny_model, family, experts="eager" if double else None, **run.changes)
    make_parallel = None
    if directory is not None:
        files = Files(family, directory / _key(run), build, "eager" if double else None)
        build, make_parallel = files.plain, partial(files.on_mesh, config=run.config)
        if run.adapter:
            adapt = partial(with_adapter, method=run.adapter)
            build, make_parallel = lambda: adapt(files.plain()), partial(files.adapted, adapt=adapt, config=run.config)
    draw: Callable[[Schedule, int, int], list[Batch]] = partial(_draw, inputs or Inputs(), double)
    if run.ragged:
        draw = partial(_draw_ragged, draw, _masks_text(build()))
    if run.packed and "position_ids" in inspect.signature(build().forward).parameters:
        draw = partial(_draw_packed, draw)
    if run.by_transformers:
        split = partial(by_transformers, files)
        if not double:
            return compare_step(files.plain, split, draw(run.schedule, 0, 0))
        with in_float64():
            return compare_step(lambda: build().double(), lambda: split().double(), draw(run.schedule, 0, 0))
    arguments = (dict(run.sizes), dist.get_world_size(), run.schedule, run.config)
    if not double:
        return compare(build, *arguments, draw=draw, make_parallel=make_parallel, device=run.device)
    with in_float64():
        return compare(lambda: build().double(), *arguments, draw=draw, make_parallel=make_parallel)


def _key(run: Run) -> str:
    """Name the folder of a model with the changes of ``run``, which may be more than fit into a name."""
    return hashlib.sha256(repr(sorted(run.changes.items())).encode()).hexdigest()[:16]


def _draw(inputs: Inputs, double: bool, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Text; where a model reads images, every other micro-batch has some, and not the same ones on all data ranks."""
    if not inputs.images and not inputs.types and inputs.image_id is None:
        return batches(schedule, step, data_rank)
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    micro = []
    for i in range(schedule.micro_batches):
        batch = inputs.draw(generator, with_images=inputs.images_needed or (i + data_rank) % 2 == 0)
        micro.append({k: v.double() if double and v.is_floating_point() else v for k, v in batch.items()})
    return micro


def _masks_text(model: nn.Module) -> bool:
    """Tell whether ``attention_mask`` is that of the text, and not of image patches, say."""
    reads_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    return reads_text and "attention_mask" in inspect.signature(model.forward).parameters


def _draw_ragged(draw: Callable, with_mask: bool, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    micro = [ragged(batch) for batch in draw(schedule, step, data_rank)]
    return micro if with_mask else [{k: v for k, v in batch.items() if k != "attention_mask"} for batch in micro]


def _draw_packed(draw: Callable, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Documents that end on the edges of chunks and beside them; a batch with images stays as it is."""
    return [
        _packed(batch) if batch.keys() == {"input_ids", "labels"} else batch
        for batch in draw(schedule, step, data_rank)
    ]


def _packed(batch: Batch) -> Batch:
    ids = batch["input_ids"]
    first, second = ids.shape[1] // 4, ids.shape[1] // 2 + 1
    lengths = (first, second - first, ids.shape[1] - second)
    return {**batch, "position_ids": torch.cat([torch.arange(n) for n in lengths]).expand_as(ids)}


def _plan(model: nn.Module) -> str:
    try:
        return select_plan(model).source
    except ValueError:
        return ""


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}{place}"
