"""What a run shows while it runs: speed, memory, health, traces. For any LightningModule, under any strategy."""

from lightning_automodel.callbacks.health import Health
from lightning_automodel.callbacks.memory import MemoryProfiler
from lightning_automodel.callbacks.progress import RichStepBar, TQDMStepBar, step_bar
from lightning_automodel.callbacks.throughput import Throughput
from lightning_automodel.callbacks.trace import TraceProfiler

__all__ = ["Health", "MemoryProfiler", "RichStepBar", "TQDMStepBar", "Throughput", "TraceProfiler", "step_bar"]
