"""Ladders: rows of which each has the levers of all rows above it, and one more."""

from collections.abc import Mapping
from typing import Any


def accumulated(rungs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give each rung the fields of those above it; of a field that two of them set, the later value."""
    fields: dict[str, Any] = {}
    return {name: (fields := {**fields, **adds}) for name, adds in rungs.items()}


def switches(fields: Mapping[str, Any]) -> list[str]:
    """Spell fields of ``FSDP2Config`` as switches of ``lightning-automodel fit``.

    The dtypes of ``mp_policy`` are given as the precision of the trainer that has the same.
    """
    return [
        "--trainer.precision=bf16-mixed"
        if name == "mp_policy"
        else f"--trainer.strategy.config.{name}={str(value).lower()}"
        for name, value in fields.items()
    ]
