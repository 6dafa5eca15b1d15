"""Writes a plan, and a search, as a page of one file: what the text says, with pictures of the mesh and of memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_automodel.mesh import AXES, EP, MeshSizes
from lightning_automodel.pages import Bar, Bars, Cell, Segment, Table, render
from lightning_automodel.planner.estimate import FORMULA, model_flops, ranks_of, seconds_of
from lightning_automodel.planner.hardware import GIGA, TERA
from lightning_automodel.planner.plan import Plan
from lightning_automodel.planner.play import Run
from lightning_automodel.planner.search import Rejected
from lightning_automodel.planner.watch import PHASES, ROLES

GIB = 2**30
_MOST_NODES = 6
_COLOURS = 8
_SIZES = ("tp", "cp", "dp_shard", "dp_replicate")
_LAYOUT = (*_SIZES, "sequence", "checkpointing", "rows")
_NUMBERS = frozenset(("#", *_SIZES, "rows", "tokens/s", "MFU", "s/step", "GiB"))

Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Node:
    """A node of a picture, or a number of nodes that it leaves out; ``ranks``: rank, colour, whether beside rank 0."""

    index: int
    ranks: Sequence[tuple[int, int, bool]] = ()
    skipped: int = 0


@dataclass(frozen=True)
class Groups:
    """How an axis of the mesh groups the ranks."""

    axis: str
    size: int
    text: str
    nodes: Sequence[Node]


def plan_page(found: Plan | None, fitting: Sequence[Plan] = (), others: Sequence[Rejected] = ()) -> str:
    """Write a page.

    Args:
        found: the plan, of a search the best; ``None``: no layout fits.
        fitting: of a search, the layouts that fit, the fastest first.
        others: of a search, those that fall out.
    """
    one = {} if found is None else _parts(found)
    blank = dict.fromkeys(("tiles", "warnings", "groups", "memory"), ())
    search = _search(fitting, others) if fitting or others else None
    title = f"Plan: {found.name}" if found else "Plan: no layout fits"
    values = {**blank, "lead": [], "title": title, **one}
    return render("plan.html", search=search, fitting=len(fitting), falling=len(others), **values)


def _parts(found: Plan) -> dict[str, object]:
    return {
        "lead": list(_lead(found)),
        "tiles": list(_tiles(found)),
        "warnings": found.warnings,
        "groups": list(groups_of(found.run.sizes, found.hardware.devices)),
        "memory": _memory(found),
        "memory_table": _memory_table(found),
        "parameters": _parameters(found),
        "collectives": _collectives(found),
        "time": list(_time(found)),
        "formula": "\n".join(line[4:] for line in FORMULA.splitlines()),
    }


def _lead(found: Plan) -> Iterator[str]:
    run, hardware = found.run, found.hardware
    cut, kept = _switches(run)
    count = -(-run.sizes.world // hardware.devices)
    nodes = "1 node" if count == 1 else f"{count} nodes"
    yield (
        f"{run.sizes.world} ranks on {nodes} of {hardware.devices} {hardware.name}, "
        f"precision {run.precision}; sequence parallelism: {cut}, activation checkpointing: {kept}"
    )
    yield f"By rank 0, where {found.basis}."


def _switches(run: Run) -> tuple[str, str]:
    """Write what the search chooses beside sizes: sequence parallelism, and checkpointing."""
    kept = run.config.activation_checkpointing
    words = {True: "full", False: "no"}[kept] if isinstance(kept, bool) else str(kept)
    return "yes" if run.config.sequence_parallel else "no", words


def _tiles(found: Plan) -> Iterator[tuple[str, str, str]]:
    run, e = found.run, found.estimate
    fits = "fits" if found.fits else "does not fit"
    more = f" x {run.accumulation} micro-batches" if run.accumulation > 1 else ""
    yield "memory", f"{found.peak / GIB:.1f} GiB", f"of {found.hardware.memory / GIB:.1f}: {fits}"
    yield "speed", f"{e.speed:,.0f}", "tokens/s, estimated"
    yield "MFU", f"{e.mfu:.1%}", "estimated"
    yield "step", f"{e.step:.3f} s", f"{e.tokens:,} tokens"
    yield "cost", f"${e.cost:,.2f}", "per 10\N{SUPERSCRIPT NINE} tokens"
    part = f"{found.trainable:,} train" if found.trainable < found.parameters else ""
    yield "parameters", f"{found.parameters / 1e9:.2f} B" if found.parameters >= 1e9 else f"{found.parameters:,}", part
    yield "rows", f"{run.micro_batch} x {run.sequence_length}", f"tokens{more} x {run.sizes.data} data ranks"


# ---- mesh ------------------------------------------------------------------------------------------------------------


def groups_of(sizes: MeshSizes, devices: int) -> Iterator[Groups]:
    """Find, for each axis of more than one rank, which ranks form its groups.

    Args:
        sizes: of the mesh.
        devices: of a node; ranks of a node are consecutive.
    """
    first = {axis: ranks_of(axis, sizes) for axis in (*AXES, EP)}
    for axis, ranks in first.items():
        if len(ranks) == 1:
            continue
        group = _group_of_each(ranks, sizes.world)
        nodes = {rank // devices for rank in ranks}
        count = sizes.world // len(ranks)
        where = "inside a node" if len(nodes) == 1 else f"each across {len(nodes)} nodes"
        groups = f"{count} {'group' if count == 1 else 'groups'} of {len(ranks)} ranks"
        text = f"{groups}, {where}; rank 0 with {_listed(ranks[1:])}"
        yield Groups(axis, len(ranks), text, list(_nodes(group, devices, sorted(nodes))))


def _group_of_each(ranks: Sequence[int], world: int) -> list[int]:
    """Number the groups: those of other ranks lie to each other as that of rank 0 does."""
    found, number = [-1] * world, 0
    for rank in range(world):
        if found[rank] < 0:
            for other in ranks:
                found[rank + other] = number
            number += 1
    return found


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:7]))
    return shown if len(ranks) <= 7 else f"{shown}, ..., {ranks[-1]}"


def _nodes(group: Sequence[int], devices: int, own: Sequence[int]) -> Iterator[Node]:
    """Choose the nodes of a picture: those of rank 0's group, and the first ones."""
    count = -(-len(group) // devices)
    wanted = list(dict.fromkeys([*own[: _MOST_NODES // 2], *range(count)]))
    last = -1
    for index in sorted(wanted[:_MOST_NODES]):
        if skipped := index - last - 1:
            yield Node(last + 1, skipped=skipped)
        ranks = range(index * devices, min((index + 1) * devices, len(group)))
        yield Node(index, [(rank, group[rank] % _COLOURS + 1, group[rank] == 0) for rank in ranks])
        last = index
    if skipped := count - last - 1:
        yield Node(last + 1, skipped=skipped)


# ---- memory, collectives, time ---------------------------------------------------------------------------------------


def _memory(found: Plan) -> Bars:
    bars = []
    for phase, roles in _peaks(found):
        parts = [Segment(r, i + 1, roles[r], f"{roles[r] / GIB:.2f} GiB") for i, r in enumerate(ROLES)]
        bars.append(Bar(phase, parts, f"{roles.total() / GIB:.2f} GiB"))
    memory = found.hardware.memory
    return Bars(bars, memory, f"A {found.hardware.name} has {memory / GIB:.1f} GiB.")


def _peaks(found: Plan) -> list[tuple[str, Counter[str]]]:
    peaks = found.watched.peaks
    return [(phase, peaks[phase]) for phase in PHASES if phase in peaks]


def _memory_table(found: Plan) -> Table:
    peaks = _peaks(found)
    phases = [phase for phase, _ in peaks]
    rows: list[Row] = [
        [role, *(_gib(roles[role]) for _, roles in peaks)] for role in ROLES if any(roles[role] for _, roles in peaks)
    ]
    rows.append(["all", *(_gib(roles.total()) for _, roles in peaks)])
    return Table("memory", ["at the peak of", *phases], rows, frozenset(phases))


def _gib(size: int) -> Cell:
    return Cell("< 0.01" if 0 < size < 0.01 * GIB else f"{size / GIB:.2f}", size)


def _parameters(found: Plan) -> Table:
    rows: list[Row] = [
        [Cell(f"{size / 2**20:,.2f}", size), name, str(split)]
        for (name, split), size in found.watched.parameters.most_common()
    ]
    return Table("parameters", ["MiB", "parameters", "placements"], rows, frozenset(("MiB",)))


def _collectives(found: Plan) -> Table:
    watched = found.watched
    rows: list[Row] = []
    for key, volume in watched.volume.most_common():
        time = seconds_of(key, watched, found.run.sizes, found.hardware) * 1e3
        calls = watched.counts[key]
        numbers = [Cell(f"{calls:,}", calls), Cell(f"{volume:,}", volume), Cell(f"{time:.2f}", time)]
        rows.append([key.kind, key.axis, key.phase, *numbers])
    numbers_of = ("calls", "bytes", "ms, estimated")
    return Table("collectives", ["kind", "axis", "phase", *numbers_of], rows, frozenset(numbers_of))


def _time(found: Plan) -> Iterator[tuple[str, str, str]]:
    e, hardware, world = found.estimate, found.hardware, found.run.sizes.world
    flops = model_flops(found.watched) * world
    yield "FLOPs per token", f"{flops / e.tokens / GIGA:,.2f} G", ""
    yield "FLOPs per step", f"{flops / TERA:,.1f} T", "of all ranks"
    yield "compute", f"{e.compute:.3f} s", "of a step"
    yield "tp and cp", f"{e.waited:.3f} s", "collectives that are waited for"
    yield "parameters, gradients", f"{e.beside:.3f} s", "collectives beside the compute"
    yield "speed of a device", f"{e.speed / world:,.0f}", "tokens/s"
    yield (
        hardware.name,
        f"{hardware.flops / TERA:.0f} TFLOP/s",
        f"x {hardware.matmul_share}; memory {hardware.memory_bandwidth / GIGA:.0f} GB/s x {hardware.memory_share}",
    )
    yield "links", f"{hardware.inside / GIGA:.0f} GB/s", f"inside, {hardware.across / GIGA:.0f} across nodes"
    yield "price", f"${hardware.price:.2f}", "per device and hour"


# ---- search ----------------------------------------------------------------------------------------------------------


def _search(fitting: Sequence[Plan], others: Sequence[Rejected]) -> Table:
    rows: list[Row] = []
    for place, found in enumerate(fitting, 1):
        e = found.estimate
        numbers = [
            Cell(f"{e.speed:,.0f}", e.speed),
            Cell(f"{e.mfu:.1%}", e.mfu),
            Cell(f"{e.step:.3f}", e.step),
            Cell(f"{found.peak / GIB:.1f}", found.peak),
        ]
        rows.append([Cell(str(place), place), *_layout(found.run), *numbers, ""])
    for one in others:
        rows.append(["", *_layout(one.run), "", "", "", "", one.reason])
    quiet = frozenset(range(len(fitting), len(rows)))
    columns = ["#", *_LAYOUT, "tokens/s", "MFU", "s/step", "GiB", "why it falls out"]
    unused = {i for i, name in enumerate(columns) if name in _SIZES and all(row[i] == Cell("1", 1) for row in rows)}
    kept = [i for i in range(len(columns)) if i not in unused]
    return Table("search", [columns[i] for i in kept], [[row[i] for i in kept] for row in rows], _NUMBERS, quiet)


def _layout(run: Run) -> list[Cell | str]:
    sizes = run.sizes
    shape = [Cell(str(n), n) for n in (sizes.tp, sizes.cp, sizes.dp_shard, sizes.dp_replicate)]
    return [*shape, *_switches(run), Cell(str(run.micro_batch), run.micro_batch)]
