"""Ranks the layouts of a world by what they would train per second, and says why the others fall out.

Sizes (of ep too, where the model has experts), sequence parallelism and checkpointing are played, each with few layers
and one and two rows; more rows cost in proportion. What comes out best is played once more as it is, with and without
replicas of the shards.
"""

import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig

from lightning_automodel.mesh import AXES, EP, MeshSizes, resolve_sizes
from lightning_automodel.planner.hardware import Hardware
from lightning_automodel.planner.layers import combine, extrapolate_each
from lightning_automodel.planner.plan import Plan, build, plan, plan_of
from lightning_automodel.planner.play import Run, play_each, stage
from lightning_automodel.plans.experts import has_experts

ROWS = (1, 2, 4, 8, 16)
CHECKPOINTING = (False, "selective", True)
_FEWEST_ROWS = 8192  # of the sequence, on a rank: shorter ones need no context parallelism
_LEAST_LAYERS = 3  # within 5 % of what all layers need; the best ones are played again
_AGAIN = 3
_SHOWN = 12


@dataclass(frozen=True)
class Rejected:
    """A layout that is not in the ranking, and why."""

    run: Run
    reason: str


def search(
    model: str | PreTrainedConfig | nn.Module, run: Run, hardware: Hardware, workers: int | None = None
) -> tuple[list[Plan], list[Rejected]]:
    """Try the layouts of the world of ``run``, and return those that fit, the fastest first, and the others.

    Args:
        model: name or directory of a model, its config, or a model on the meta device.
        run: what all layouts have in common; its own sizes, sequence parallelism, checkpointing and rows are replaced.
        hardware: the devices.
        workers: processes that play; ``None``: one for each CPU of this process.
    """
    built = model if isinstance(model, nn.Module) else build(model)
    jobs = [(candidate, hardware) for candidate in layouts(run, hardware, has_experts(built))]
    count = workers or len(os.sched_getaffinity(0))
    # Workers inherit the model, and know operations of the first plays in the second ones.
    with ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _inherit, (built,)) as pool:
        results = list(pool.map(_try, jobs))
        plans = [found for plans, _ in results for found in plans]
        rejected = [one for _, ones in results for one in ones]
        fitting = sorted((found for found in plans if found.fits), key=_slowness)
        again = [(one, hardware) for found in fitting[:_AGAIN] for one in _replicated(found.run, hardware)]
        exact = [found for found in pool.map(_again, again) if found.fits]
    known = {(found.run.sizes, found.run.config, found.run.micro_batch) for found in exact}
    rest = [found for found in fitting if (found.run.sizes, found.run.config, found.run.micro_batch) not in known]
    rejected += [Rejected(found.run, found.warnings[0]) for found in plans if not found.fits]
    return sorted([*exact, *rest], key=_slowness), rejected


def layouts(run: Run, hardware: Hardware, experts: bool = False) -> Iterator[Run]:
    """List the layouts to try, with one row each.

    Args:
        run: what they have in common.
        hardware: of whose nodes tp and ep do not cross the borders.
        experts: whether tokens may travel to experts.
    """
    world = run.sizes.world
    for tp in _powers(min(hardware.devices, world)):
        for cp in _powers(max(1, run.sequence_length // _FEWEST_ROWS)):
            for ep in _powers(hardware.devices // tp) if experts else (1,):
                if world % (tp * cp) == 0 and world // tp % ep == 0:
                    yield from _levers(replace(run, sizes=resolve_sizes(world, tp=tp, cp=cp, ep=ep), micro_batch=1))


def _levers(run: Run) -> Iterator[Run]:
    tp = run.sizes.tp
    for cut in (True, False) if tp > 1 else (False,):
        for checkpointing in CHECKPOINTING if cut or tp == 1 else CHECKPOINTING[:1]:
            config = replace(run.config, sequence_parallel=cut, activation_checkpointing=checkpointing)
            yield replace(run, config=config)


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def _slowness(found: Plan) -> float:
    return -found.estimate.speed


_inherited: list[nn.Module] = []


def _inherit(model: nn.Module) -> None:
    """Be a worker that plays ``model``. What it inherits is never garbage: no play needs to look through it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the process that asked says so, once
    warnings.simplefilter("ignore")  # of layouts that are only tried, once from each process
    _inherited.append(model)
    gc.freeze()


def _try(job: tuple[Run, Hardware]) -> tuple[list[Plan], list[Rejected]]:
    """Play one layout, and return a plan for each number of rows up to the first that does not fit."""
    run, hardware = job
    built = _inherited[0]
    try:
        with stage(run) as mesh:
            both = [replace(run, micro_batch=rows) for rows in (1, 2)]
            (one, two), basis = extrapolate_each(built, lambda cut: play_each(cut, both, mesh, ends=1), _LEAST_LAYERS)
    except ValueError as error:
        return [], [Rejected(run, str(error))]
    plans: list[Plan] = []
    for rows in ROWS:
        watched, this = combine([(one, 2 - rows), (two, rows - 1)]), replace(run, micro_batch=rows)
        found = plan_of(built, this, hardware, watched, f"{basis}, with one and two rows")
        limit = f"{found.peak / 2**30:.1f} of {hardware.memory / 2**30:.1f} GiB in the phase {found.phase!r}"
        plans.append(replace(found, warnings=[] if found.fits else [limit]))
        if not found.fits:
            break
    return plans, []


def _again(job: tuple[Run, Hardware]) -> Plan:
    return plan(_inherited[0], *job)


def _replicated(run: Run, hardware: Hardware) -> Iterator[Run]:
    """List ``run``, and the same with the shards of each node repeated in all nodes."""
    yield run
    nodes = run.sizes.world // hardware.devices
    shards = run.sizes.dp_shard // max(nodes, 1)
    if nodes > 1 and run.sizes.dp_shard % nodes == 0 and shards * run.sizes.cp % run.sizes.ep == 0:
        yield replace(run, sizes=replace(run.sizes, dp_replicate=nodes, dp_shard=shards))


def describe_search(fitting: Sequence[Plan], others: Sequence[Rejected]) -> str:
    """Write the ranking as text, and why other layouts are not in it."""
    lines = [f"  {'layout':<52}{'tokens/s':>12}{'MFU':>8}{'s/step':>9}{'GiB':>8}"]
    for found in fitting[:_SHOWN]:
        e = found.estimate
        lines.append(
            f"  {name_of(found.run):<52}{e.speed:>12,.0f}{e.mfu:>8.1%}{e.step:>9.3f}{found.peak / 2**30:>8.1f}"
        )
    more = len(fitting) - _SHOWN
    lines += [f"  and {more} more that fit"] if more > 0 else []
    lines += [f"Layouts that fall out: {len(others)}"] if others else []
    lines += [f"  {name_of(one.run):<52}{one.reason}" for one in others]
    first = "Layouts that fit, the fastest first" if fitting else "No layout fits"
    return "\n".join([first, *lines]) + "\n"


def name_of(run: Run) -> str:
    """Write what a layout is made of in one line."""
    sizes: MeshSizes = run.sizes
    named = zip((*AXES, EP), (*sizes.shape, sizes.ep), strict=True)
    parts = [f"{name}={size}" for name, size in named if size > 1]
    parts += ["sequence"] * run.config.sequence_parallel
    kept = run.config.activation_checkpointing
    parts += [{True: "checkpointed", "selective": "selective"}[kept]] if kept else []
    return " ".join([*parts, f"rows={run.micro_batch}"])
