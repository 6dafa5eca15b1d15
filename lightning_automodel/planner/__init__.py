"""A run that is not started: the same stages and the same step on tensors without memory, in one CPU process."""

from lightning_automodel.planner.hardware import HARDWARE, Hardware
from lightning_automodel.planner.plan import Plan, plan
from lightning_automodel.planner.play import Run
from lightning_automodel.planner.report import describe
from lightning_automodel.planner.search import describe_search, search

__all__ = ["HARDWARE", "Hardware", "Plan", "Run", "describe", "describe_search", "plan", "search"]
