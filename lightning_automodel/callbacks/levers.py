"""Asks the planner what would need less memory in the same layout: a process of its own, without groups and devices.

``python -m lightning_automodel.callbacks.levers`` reads a pickled :class:`Question` and writes an :class:`Answer`.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

import lightning_automodel
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner import Hardware, Plan, Run, plan

_ROOT = Path(lightning_automodel.__file__).parents[1]
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@dataclass(frozen=True)
class Question:
    """A run that did not fit, and its model on the meta device, with what trains of it."""

    model: nn.Module
    run: Run
    hardware: Hardware


@dataclass(frozen=True)
class Lever:
    """What one change would do.

    Attributes:
        name: as it is written in a configuration.
        peak: bytes of rank 0.
        speed: estimated tokens per second, of those of the run as it is.
    """

    name: str
    peak: int
    speed: float


@dataclass(frozen=True)
class Answer:
    """What was planned of a run.

    Attributes:
        phase: of a step with the most memory.
        roles: bytes of rank 0 at that moment, by what they are for.
        levers: what would need less, the least first.
    """

    phase: str
    roles: dict[str, int]
    levers: list[Lever]

    @property
    def peak(self) -> int:
        """Sum the bytes at the moment with the most memory."""
        return sum(self.roles.values())


def variants(run: Run) -> Iterator[tuple[str, Run]]:
    """List what can be changed of a run on the same ranks, each with its name; not offload, which cannot be played."""
    switches: dict[str, Any] = {
        "activation_checkpointing": True,
        "chunked_loss": 1024,
        "reshard_after_forward": True,
    }
    if run.sizes.tp > 1:
        switches["sequence_parallel"] = True
    for name, value in switches.items():
        if not getattr(run.config, name):
            yield f"{name}={value}", replace(run, config=replace(run.config, **{name: value}))
    if not run.config.activation_checkpointing:
        kept = replace(run.config, activation_checkpointing="selective")
        yield "activation_checkpointing='selective'", replace(run, config=kept)
    if run.micro_batch > 1:
        half = replace(run, micro_batch=run.micro_batch // 2, accumulation=run.accumulation * 2)
        yield f"batch_size={half.micro_batch}, accumulate_grad_batches={half.accumulation}", half
    sizes = run.sizes
    for name in ("tp", "cp"):
        more = {"tp": sizes.tp, "cp": sizes.cp, name: 2 * getattr(sizes, name)}
        if sizes.dp_shard % 2 == 0 and sizes.ep == 1:
            wider = resolve_sizes(sizes.world, dp_replicate=sizes.dp_replicate, **more)
            yield f"{name}={more[name]}", replace(run, sizes=wider)


def answer(question: Question) -> Answer:
    """Plan the run as it is, and each of its variants.

    Raises:
        ValueError: if the run cannot be planned.
    """
    base = plan(question.model, question.run, question.hardware)
    levers = []
    for name, run in variants(question.run):
        try:
            found = plan(question.model, run, question.hardware)
        except Exception:  # the model or another switch does not allow it, or it cannot be played
            continue
        if found.peak < base.peak:
            levers.append(Lever(name, found.peak, _tokens_per_second(found) / _tokens_per_second(base)))
    return Answer(base.phase, dict(base.watched.peaks[base.phase]), sorted(levers, key=lambda lever: lever.peak))


def _tokens_per_second(found: Plan) -> float:
    return found.estimate.speed


def ask(question: Question, seconds: float, run: Callable[..., Any] = subprocess.run) -> Answer:
    """Answer a question in another process: this one has groups, and perhaps no memory.

    Raises:
        ValueError: with the last line of what went wrong.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    path = os.pathsep.join(filter(None, [str(_ROOT), kept.get("PYTHONPATH", "")]))
    try:
        done = run(
            [sys.executable, "-m", __name__ if __name__ != "__main__" else "lightning_automodel.callbacks.levers"],
            input=pickle.dumps(question),
            capture_output=True,
            timeout=seconds,
            env={**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the planner needed more than {seconds:.0f} s") from None
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return pickle.loads(done.stdout)


def main() -> None:
    """Answer the question of standard input; whatever else is printed goes to the errors."""
    out = sys.stdout.buffer
    sys.stdout = sys.stderr
    from lightning_automodel.callbacks import levers  # not __main__: the answer is read by its module's name

    out.write(pickle.dumps(levers.answer(pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
