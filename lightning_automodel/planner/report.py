"""Writes a plan as text, for a terminal: lines of at most 100 characters."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from lightning_automodel.mesh import AXES, EXPERTS
from lightning_automodel.planner.estimate import FORMULA, model_flops, ranks_of, seconds_of
from lightning_automodel.planner.hardware import GIGA, TERA
from lightning_automodel.planner.plan import Plan
from lightning_automodel.planner.watch import PHASES, ROLES, Collective

_MOST_PARAMETERS = 16


def describe(found: Plan) -> str:
    """Write all that is known of a run that was planned."""
    parts = (_head, _mesh, _memory, _parameters, _collectives, _time)
    return "\n".join("\n".join(part(found)) + "\n" for part in parts) + "\n".join(_notes(found)) + "\n"


def _head(found: Plan) -> Iterator[str]:
    run = found.run
    part = f", of which {_count(found.trainable)} train" if found.trainable < found.parameters else ""
    yield f"{found.name}: {_count(found.parameters)} parameters{part}, precision {run.precision}"
    yield f"By rank 0, where {found.basis}"
    rows = f"{run.micro_batch} x {run.sequence_length} tokens"
    more = f" x {run.accumulation} micro-batches" if run.accumulation > 1 else ""
    yield f"A step: {rows}{more} x {run.sizes.data} data ranks = {found.estimate.tokens:,} tokens"


def _mesh(found: Plan) -> Iterator[str]:
    sizes, devices = found.run.sizes, found.hardware.devices
    nodes = -(-sizes.world // devices)
    yield f"Mesh: {sizes.world} ranks on {nodes} nodes of {devices} {found.hardware.name}"
    for axis in (*AXES, *(EXPERTS if sizes.ep > 1 else ())):
        ranks = ranks_of(axis, sizes)
        if len(ranks) > 1:
            where = "inside a node" if ranks[-1] < devices else f"across {len({r // devices for r in ranks})} nodes"
            yield f"  {axis:<14}{len(ranks):>6}   {where:<18} ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ..., {ranks[-1]}"


def _memory(found: Plan) -> Iterator[str]:
    limit = found.hardware.memory
    yield (
        f"Memory of rank 0: {_bytes(found.peak)} of {_bytes(limit)} ({found.peak / limit:.0%}), "
        f"most of it in the phase {found.phase!r}"
    )
    yield "  " + f"{'GiB at the peak of':<20}" + "".join(f"{phase:>15}" for phase in PHASES)
    peaks = found.watched.peaks
    for role in ROLES:
        if any(peaks[phase][role] for phase in peaks):
            yield f"  {role:<20}" + "".join(f"{peaks.get(p, Counter())[role] / 2**30:>15.2f}" for p in PHASES)
    yield f"  {'all':<20}" + "".join(f"{sum(peaks.get(p, Counter()).values()) / 2**30:>15.2f}" for p in PHASES)


def _parameters(found: Plan) -> Iterator[str]:
    rows = found.watched.parameters.most_common()
    yield f"Parameters of rank 0: {_bytes(sum(found.watched.parameters.values()))}"
    for (name, split), size in rows[:_MOST_PARAMETERS]:
        yield f"  {_bytes(size):>10}  {_short(name, 48):<48}  {split}"[:100]
    if rest := rows[_MOST_PARAMETERS:]:
        yield f"  {_bytes(sum(size for _, size in rest)):>10}  {len(rest)} more"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"...{name[3 - width :]}"


def _collectives(found: Plan) -> Iterator[str]:
    watched, sizes = found.watched, found.run.sizes
    yield "Collectives of a step, on rank 0"
    yield f"  {'kind':<16}{'axis':<14}{'phase':<18}{'calls':>8}{'GB':>10}{'ms':>10}"
    for key in _sorted(watched.volume):
        time = seconds_of(key, watched, sizes, found.hardware)
        numbers = f"{watched.counts[key]:>8}{watched.volume[key] / GIGA:>10.3f}{time * 1e3:>10.1f}"
        yield f"  {key.kind:<16}{key.axis:<14}{key.phase:<18}{numbers}"


def _sorted(volume: Counter[Collective]) -> Iterable[Collective]:
    return sorted(volume, key=lambda key: (-volume[key], str(key)))


def _time(found: Plan) -> Iterator[str]:
    e, hardware = found.estimate, found.hardware
    world = found.run.sizes.world
    flops = model_flops(found.watched) * world
    yield f"FLOPs: {flops / e.tokens / GIGA:.2f} G per token, {flops / TERA:,.1f} T per step, of all ranks"
    yield (
        f"Step: about {e.step:.3f} s (compute {e.compute:.3f}, tp, cp and ep {e.waited:.3f}, "
        f"parameters and gradients {e.beside:.3f} beside)"
    )
    yield f"Speed: about {e.speed:,.0f} tokens/s, {e.speed / world:,.0f} per device; MFU {e.mfu:.1%}"
    yield f"Cost: about ${e.cost:,.2f} per 10^9 tokens, at ${hardware.price:.2f} per device and hour"
    yield (
        f"  {hardware.name}: {hardware.flops / TERA:.0f} TFLOP/s x {hardware.matmul_share}, "
        f"{hardware.memory_bandwidth / GIGA:.0f} GB/s x {hardware.memory_share}, "
        f"{hardware.inside / GIGA:.0f} GB/s inside, {hardware.across / GIGA:.0f} across nodes"
    )
    yield from (line[2:] for line in FORMULA.splitlines())


def _notes(found: Plan) -> Iterator[str]:
    for warning in found.warnings:
        yield from textwrap.wrap(f"Warning: {warning}", 100, subsequent_indent="  ")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"
