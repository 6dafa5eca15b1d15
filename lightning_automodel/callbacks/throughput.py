"""Logs how fast a run is, what its steps spend their time on, and when it will end."""

import resource
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_automodel.callbacks.clock import DATA, FORWARD_BACKWARD, OPTIMIZER, OTHER, PHASES, Clock, FetchListener
from lightning_automodel.callbacks.documents import count_documents, documents_of, rows_of
from lightning_automodel.callbacks.sample import StepProfile
from lightning_automodel.callbacks.steps import StepCounter, data_group, is_time_to_log, seconds_left, steps_in_all
from lightning_automodel.distributed.logs import log_once
from lightning_automodel.planner.flops import ModelFlops, Window, count_model, find_model, whole_twin, windows_of
from lightning_automodel.planner.hardware import TERA, find_hardware, hardware_of

_NOT_A_STEP = "not a step"


class Throughput(Callback):
    """Counts tokens and samples, each once in whatever layout, and logs speed every ``log_every_n_steps`` steps.

    Between two logs there is no communication and no wait: counts add up on the device, and marks are events on its
    stream. Logged under ``train/``, as means over the steps since the last log, validation left out:

    * ``tokens_per_second``, ``tokens_per_second_per_device``, ``samples_per_second``, ``tokens_seen``: real tokens, by
      attention mask, or by positions and labels of packed rows;
    * ``seconds_per_step``, of them on rank 0 ``seconds_data``, ``seconds_forward_backward`` (tp and cp included),
      ``seconds_optimizer`` (clipping included), ``seconds_other`` (loggers, checkpoints); ``seconds_waiting``: see
      ``sample_every_n_steps``;
    * ``tflops_per_device`` and ``mfu``: what the model needs (:mod:`lightning_automodel.planner.flops`), by documents
      and windows, without recomputation;
    * ``peak_memory_gib``: the most of any rank since the process began, of CUDA's allocator, or resident;
    * ``eta_seconds``: to the end of the run at the pace so far, validation included, or to ``max_time``.

    Args:
        peak: FLOP/s of a device, or its name in the planner ("h100"); ``None``: by CUDA's name of it. Without one there
            is no ``mfu``.
        documents: from a batch to the lengths of its documents, int64 of any shape on any device; ``None``: batches are
            dicts as models of transformers take. Of other batches only samples are counted.
        sample_every_n_steps: one step in so many is profiled, and the time in which rank 0 only waits for collectives
            is logged as ``seconds_waiting``: communication that no computation hides. The step takes longer.
    """

    def __init__(
        self,
        peak: float | str | None = None,
        documents: Callable[[Any], Tensor | None] = documents_of,
        sample_every_n_steps: int | None = None,
    ) -> None:
        super().__init__()
        self._peak = find_hardware(peak).flops if isinstance(peak, str) else peak
        self._documents, self._sample_every = documents, sample_every_n_steps
        self.tokens = self.samples = 0
        self.logged: dict[str, float] = {}
        self._steps, self._listener = StepCounter(), FetchListener(self._on_fetch)
        self._sums: Tensor | None = None  # [samples, tokens, pairs of each window] that are on the device only
        self._flops: ModelFlops | None = None
        self._is_counted = False

    # ---- a run -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clocks."""
        model = find_model(pl_module)
        self._windows: list[Window] = [] if model is None else windows_of(model)
        self._trainer, self._clock = trainer, Clock(pl_module.device)
        self._sample: StepProfile | None = None
        self._sums = torch.zeros(2 + len(self._windows), dtype=torch.int64, device=pl_module.device)
        self._unlogged = [0] * len(self._sums)
        self._waited: float | None = None
        self._steps.start(trainer)
        self._listener.install(trainer)
        self._total, self._paused = steps_in_all(trainer), 0.0
        self._begin, self._begin_step = time.perf_counter(), trainer.global_step
        self._last, self._last_step = self._begin, trainer.global_step

    def _on_fetch(self) -> None:
        self._clock.mark(DATA)
        every = self._sample_every
        if every and self._sample is None and (self._trainer.global_step + 1) % every == 0:
            self._sample = StepProfile.begin()

    def on_train_batch_start(self, *_: Any) -> None:
        """Notes that the batch is there."""
        self._clock.mark(FORWARD_BACKWARD)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Notes that the gradients are there."""
        self._clock.mark(OPTIMIZER)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and logs if it is time."""
        self._clock.mark(OTHER)
        self._add(batch)
        if not self._steps.has_stepped(trainer):
            return
        if self._sample is not None:
            sample, self._sample = self._sample.end(), None
            self._waited = sample.waited if sample is not None else None
        if is_time_to_log(trainer):
            self._log(trainer, pl_module)

    def _add(self, batch: Any) -> None:
        assert self._sums is not None
        lengths = self._documents(batch)
        self._sums[0] += rows_of(batch)
        if lengths is not None:
            self._sums[1:] += count_documents(lengths.to(self._sums.device), self._windows)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops the clock of the steps."""
        if self._sums is not None:
            self._clock.mark(_NOT_A_STEP)
            self._pause = time.perf_counter()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets the clock of the steps go on."""
        if self._sums is not None:
            self._clock.mark(OTHER)
            self._paused += time.perf_counter() - self._pause

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Leaves the trainer as it was."""
        self._settle()
        self._finish(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Leaves the trainer as it was."""
        StepProfile.abandon()
        self._finish(trainer)

    def _finish(self, trainer: "pl.Trainer") -> None:
        self._listener.remove(trainer)
        self._sums = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen so far, by all ranks. Collective within a run."""
        self._settle()
        return {"tokens": self.tokens, "samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on counting."""
        self.tokens, self.samples = state_dict["tokens"], state_dict["samples"]

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Add the counts of all data ranks since the last call to those of the run. Collective, and a wait."""
        if self._sums is None:
            return
        sums, group = self._sums.clone(), data_group(self._trainer)
        self._sums.zero_()
        if group is not None:
            dist.all_reduce(sums, group=group)
        counts = sums.tolist()
        self._unlogged = [a + b for a, b in zip(self._unlogged, counts, strict=True)]
        self.samples, self.tokens = self.samples + counts[0], self.tokens + counts[1]

    def _log(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        """Log the means since the last time. Collective."""
        self._clock.mark(_NOT_A_STEP)
        self._settle()
        now, steps = time.perf_counter(), trainer.global_step - self._last_step
        seconds = now - self._last - self._paused
        values = {
            **self._speed(seconds, trainer.world_size),
            "seconds_per_step": seconds / steps,
            **{f"seconds_{phase}": time / steps for phase, time in self._clock.take().items() if phase in PHASES},
            **self._work(module, seconds, trainer.world_size),
            "peak_memory_gib": _peak_memory(trainer, module.device) / 2**30,
        }
        if self._waited is not None:
            values["seconds_waiting"] = self._waited
        pace = (now - self._begin) / (trainer.global_step - self._begin_step)
        if (eta := min(pace * (self._total - trainer.global_step), seconds_left(trainer))) < float("inf"):
            values["eta_seconds"] = eta
        for name, value in values.items():
            # On the host and as wide as counts are: no device is asked, and no token gets lost.
            module.log(f"train/{name}", torch.tensor(value, dtype=torch.float64))
        self.logged, self._unlogged = values, [0] * len(self._unlogged)
        self._clock.mark(OTHER)
        self._last, self._last_step, self._paused = time.perf_counter(), trainer.global_step, 0.0

    def _speed(self, seconds: float, world: int) -> dict[str, float]:
        samples, tokens, *_ = self._unlogged
        found = {"samples_per_second": samples / seconds}
        if self.tokens:
            found |= {
                "tokens_per_second": tokens / seconds,
                "tokens_per_second_per_device": tokens / seconds / world,
                "tokens_seen": float(self.tokens),
            }
        return found

    def _work(self, module: "pl.LightningModule", seconds: float, world: int) -> dict[str, float]:
        """Compare what the model needs for the tokens that were seen with what the devices can do."""
        if not self._is_counted:
            self._is_counted, self._flops = True, _count(module)
        _, tokens, *pairs = self._unlogged
        if self._flops is None or not tokens:
            return {}
        work = self._flops.of(tokens, dict(zip(self._windows, pairs, strict=True)))
        speed, peak = work / seconds / world, self._peak or _peak_of(module.device)
        return {"tflops_per_device": speed / TERA, **({"mfu": speed / peak} if peak else {})}


def _count(module: "pl.LightningModule") -> ModelFlops | None:
    """Count what a token costs, if the module holds a model whose operations torch can count."""
    model = find_model(module)
    if model is None:
        return None
    key = _key(model)
    try:
        if key not in _COUNTED:
            _COUNTED[key] = count_model(whole_twin(model))
        return _COUNTED[key]
    except Exception as error:  # code of a user's model, on tensors without values: no reason to end a run
        log_once(f"Throughput: no FLOPs and no MFU of {type(model).__name__}: {type(error).__name__}: {error}")
        return None


_COUNTED: dict[Any, ModelFlops] = {}
"""By class, config and what is frozen: a process may train the same model several times."""


def _key(model: Any) -> Any:
    config, adapters = getattr(model, "config", None), getattr(model, "peft_config", None)
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    return type(model).__name__, str(config), str(adapters), frozen


def _peak_of(device: torch.device) -> float | None:
    found = hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if found is None else found.flops


def _peak_memory(trainer: "pl.Trainer", device: torch.device) -> float:
    """Find the bytes of the rank that has held most. Collective."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most = torch.tensor(own, dtype=torch.int64, device=device)
    if trainer.world_size > 1 and dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
