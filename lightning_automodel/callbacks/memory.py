"""Says, when memory runs out, what was planned, what was measured, and what would help."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_automodel._compat.torch.profiling import record_memory, write_memory
from lightning_automodel.callbacks.levers import Answer, Question, ask
from lightning_automodel.distributed.logs import logger
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.planner import HARDWARE, Run
from lightning_automodel.planner.flops import find_model, whole_twin
from lightning_automodel.planner.hardware import hardware_of
from lightning_automodel.strategies import FSDP2TPStrategy

_GIB = 2**30
_MOST = 3


class MemoryProfiler(Callback):
    """On ``torch.OutOfMemoryError``: writes what the allocator remembers, and a report; the error goes on.

    The report has the planner's table beside what was measured on this rank, and the three changes that need the least
    memory in the same layout, by the planner. It is logged, and written beside the snapshot, which
    https://docs.pytorch.org/memory_viz shows. Where several ranks run out of memory, one of them asks the planner.

    Args:
        dirpath: folder; ``None``: where the trainer logs.
        history: allocations that CUDA's allocator remembers, with the lines that made them; 0: none, and no snapshot.
        seconds: that the planner may take.
    """

    def __init__(self, dirpath: str | Path | None = None, history: int = 100_000, seconds: float = 120.0) -> None:
        super().__init__()
        self.dirpath, self.history, self.seconds = dirpath, history, seconds
        self._shape: tuple[int, ...] | None = None
        self._folder = Path()

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Chooses the folder, and lets the allocator remember."""
        root = self.dirpath or trainer.log_dir or trainer.default_root_dir
        self._folder = Path(trainer.strategy.broadcast(str(root)))
        if trainer.is_global_zero:
            (self._folder / _CLAIM).unlink(missing_ok=True)
        if self._records(pl_module):
            record_memory(self.history)

    def _records(self, module: "pl.LightningModule") -> bool:
        return self.history > 0 and module.device.type == "cuda"

    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, _: int) -> None:
        """Notes how large a micro-batch is."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._shape = tuple(ids.shape) if isinstance(ids, Tensor) else None

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets the allocator forget."""
        if self._records(pl_module):
            record_memory(None)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Writes snapshot and report, if this is what has happened."""
        if not isinstance(exception, torch.OutOfMemoryError):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"out-of-memory-rank-{trainer.global_rank}"
        if self._records(pl_module):
            write_memory(str(self._folder / f"{name}.pickle"))
        text = "\n".join(self._report(trainer, pl_module))
        (self._folder / f"{name}.txt").write_text(f"{text}\n")
        logger.error("%s\n  written to %s", text, self._folder / f"{name}.txt")

    def _report(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> Iterator[str]:
        yield f"rank {trainer.global_rank} ran out of memory after {trainer.global_step} optimizer steps"
        measured, found = measure(trainer, module), None
        try:
            question = self._question(trainer, module)
            if _claims(self._folder):
                found = ask(question, self.seconds)
            else:
                yield "  what was planned is in the report of another rank"
        except Exception as reason:  # whatever ails the planner, the error that is reported goes on
            yield f"  not planned: {reason}"
        yield from _table(found, measured)
        if found is not None:
            yield from _levers(found)

    def _question(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> Question:
        strategy, model = trainer.strategy, find_model(module)
        if not isinstance(strategy, FSDP2TPStrategy):
            raise ValueError(f"the planner knows FSDP2TPStrategy, and this is {type(strategy).__name__}")
        if model is None or self._shape is None or len(self._shape) != 2:
            raise ValueError("there is no model of transformers that reads batches with input_ids [rows, seq]")
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError("the planner does not know quantized weights")
        hardware = HARDWARE["h100"]
        if module.device.type == "cuda":
            known = hardware_of(torch.cuda.get_device_name(module.device)) or hardware
            hardware = replace(known, memory=torch.cuda.get_device_properties(module.device).total_memory)
        run = Run(
            sizes=strategy.sizes,
            config=replace(strategy.config, enable_compile=False),
            micro_batch=self._shape[0],
            sequence_length=self._shape[1],
            accumulation=trainer.accumulate_grad_batches,
            precision=str(trainer.precision),
            clips=bool(trainer.gradient_clip_val),
            device_type=module.device.type,
        )
        return Question(whole_twin(model), run, hardware)


_CLAIM = "out-of-memory.claim"


def _claims(folder: Path) -> bool:
    """Tell whether this rank is the first of this run to ask."""
    try:
        (folder / _CLAIM).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def measure(trainer: "pl.Trainer", module: "pl.LightningModule") -> dict[str, int]:
    """Count the bytes of this rank by what they are for; on CUDA, also the most that was allocated."""
    parameters = list(module.parameters())
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    found = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p.grad for p in parameters),
        "optimizer": _bytes(value for state in states for value in state.values()),
    }
    if module.device.type == "cuda":
        found["all"] = torch.cuda.max_memory_allocated(module.device)
    return found


def _bytes(values: Any) -> int:
    tensors = [to_local_if_dtensor(value) for value in values if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _table(found: Answer | None, measured: Mapping[str, int]) -> Iterator[str]:
    planned = {} if found is None else {**{r: size for r, size in found.roles.items() if size}, "all": found.peak}
    at = "" if found is None else f" (planned: at the peak, in the phase {found.phase!r})"
    yield f"  {'bytes of this rank':<24}{'planned':>12}{'measured':>12}{at}"
    write: Callable[[int | None], str] = lambda size: "" if size is None else size_of(size)  # noqa: E731
    for role in dict.fromkeys([*planned, *measured]):
        yield f"  {role:<24}{write(planned.get(role)):>12}{write(measured.get(role)):>12}"


def size_of(size: int) -> str:
    """Write so many bytes for people."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 4 else f"{size / 2**20:.2f} MiB"


def _levers(found: Answer) -> Iterator[str]:
    if not found.levers:
        yield "  no single change of this layout needs less, by the planner; use more ranks"
        return
    yield f"  what needs least, by the planner, of {size_of(found.peak)} (and tokens per second of now):"
    for lever in found.levers[:_MOST]:
        yield f"    {lever.name:<48}{size_of(lever.peak):>12}  x {lever.speed:.2f}"
