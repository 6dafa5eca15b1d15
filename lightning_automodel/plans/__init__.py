"""Tensor-parallel plans: which one a model gets, and what it means for every parameter and module."""

from lightning_automodel.plans.derivation import derive_layout
from lightning_automodel.plans.layout import Layout, ModuleLayout, ParameterLayout
from lightning_automodel.plans.selection import Plan, select_plan
from lightning_automodel.plans.validation import validate_tp

__all__ = ["Layout", "ModuleLayout", "ParameterLayout", "Plan", "derive_layout", "select_plan", "validate_tp"]
