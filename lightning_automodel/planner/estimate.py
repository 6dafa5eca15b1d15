"""Turns what a step does into seconds, MFU and money, by formulas that are written out here and printed with them.

::

    compute         FLOPs / (peak x share) + bytes of other operations / (memory bandwidth x share)
    a collective    latency + (n - 1) / n x bytes / bandwidth of n ranks, twice that for all-reduce
    bandwidth       inside a node, or across: min(inside, all interfaces of a node that the group has)
    step            max(compute, other collectives) + tp and cp collectives and all-to-all
    MFU             FLOPs without recomputation / (step x peak); causal attention counts as full
    cost            devices x price per hour x hours per 10^9 tokens
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_automodel.mesh import AXES, EP, EXPERTS, FLATTENED, MeshSizes
from lightning_automodel.planner.hardware import Hardware
from lightning_automodel.planner.play import Run
from lightning_automodel.planner.watch import BACKWARD, FORWARD, HEAD, Collective, Watched

_WAITED_FOR = ("tp", "cp", "cp_tp")
FORMULA = __doc__.partition("::\n\n")[2].rstrip()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Times of one optimizer step, in seconds.

    Attributes:
        compute: of this rank's operations.
        waited: for collectives that the next operation needs.
        beside: collectives of parameters and gradients, which run beside the compute.
        step: all in all.
        tokens: of all data ranks.
        mfu: model FLOP/s utilization.
        cost: US dollars per 10^9 tokens.
    """

    compute: float
    waited: float
    beside: float
    step: float
    tokens: int
    mfu: float
    cost: float

    @property
    def speed(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.step


def tokens_of(run: Run) -> int:
    """Count the tokens of an optimizer step, over all data ranks."""
    return run.micro_batch * run.sequence_length * run.accumulation * run.sizes.data


def model_flops(watched: Watched) -> int:
    """Count the FLOPs of a step on this rank without recomputation: a backward pass is at most two forward passes.

    It is less where parameters are frozen, or where the loss has made its gradients in the forward pass.
    """
    forward = watched.flops[FORWARD] + watched.flops[HEAD]
    return forward + min(2 * forward, watched.flops[BACKWARD] - watched.recomputed[BACKWARD])


def estimate(watched: Watched, run: Run, hardware: Hardware) -> Estimate:
    """Estimate the time of the step that was watched, and what it costs."""
    traffic = sum(watched.traffic.values()) / (hardware.memory_bandwidth * hardware.memory_share)
    compute = sum(watched.flops.values()) / (hardware.flops * hardware.matmul_share) + traffic
    times = {key: seconds_of(key, watched, run.sizes, hardware) for key in watched.counts}
    waited = sum(time for key, time in times.items() if key.axis in _WAITED_FOR or key.kind == "all_to_all")
    beside = sum(times.values()) - waited
    step = max(compute, beside) + waited
    tokens, world = tokens_of(run), run.sizes.world
    return Estimate(
        compute=compute,
        waited=waited,
        beside=beside,
        step=step,
        tokens=tokens,
        mfu=model_flops(watched) / (step * hardware.flops),
        cost=10**9 / (tokens / step) * world * hardware.price / 3600,
    )


def seconds_of(key: Collective, watched: Watched, sizes: MeshSizes, hardware: Hardware) -> float:
    """Estimate how long all calls of a kind of collective take."""
    ranks = ranks_of(key.axis, sizes)
    share = (2 if key.kind == "all_reduce" else 1) * (len(ranks) - 1) / len(ranks)
    return watched.counts[key] * hardware.latency + share * watched.volume[key] / bandwidth(ranks, hardware)


def bandwidth(ranks: Sequence[int], hardware: Hardware) -> float:
    """Return the bytes per second that each rank of a group sends in a ring: over the slowest of its links."""
    nodes = {rank // hardware.devices for rank in ranks}
    if len(nodes) == 1:
        return hardware.inside
    return min(hardware.inside, hardware.across * len(ranks) / len(nodes))


def ranks_of(axis: str, sizes: MeshSizes) -> list[int]:
    """List the ranks of rank 0's group over an axis, or over several that were flattened; all ranks for others."""
    if axis in EXPERTS:
        shards, ep, tp = sizes.dp_shard * sizes.cp, sizes.ep, sizes.tp
        return list(range(0, ep * tp, tp) if axis == EP else range(0, shards * tp, ep * tp))
    names = FLATTENED.get(axis, (axis,) if axis in AXES else AXES)
    ranks = [0]
    for i, name in enumerate(AXES):
        if name in names:
            stride = math.prod(sizes.shape[i + 1 :])
            ranks = [rank + k * stride for rank in ranks for k in range(sizes.shape[i])]
    return sorted(ranks)
