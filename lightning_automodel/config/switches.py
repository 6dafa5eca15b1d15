"""What the stages read of a config, and what those configs have that lack a switch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch.distributed.tensor.parallel import ParallelStyle

LEVERS_OF_BLOCKS = (
    "activation_checkpointing",
    "activation_checkpointing_scope",
    "activation_offload",
    "enable_compile",
    "float8",
    "fsdp2_min_num_params",
)
"""Fields that work on the repeated blocks of a model."""

SWITCHES_OF_COMPILE = ("compile_backend", "compile_dynamic")
"""Fields that say how, where ``enable_compile`` says whether."""

SWITCHES_OF_LOSS = ("chunked_loss", "loss_kernel")
"""Fields that work on the loss of a language model of transformers."""


class StageSwitches:
    """The switches that stages read. The config of a strategy has those that it offers as fields; others stay off."""

    tp_plan: Mapping[str, str | ParallelStyle] | str | None = None
    sequence_parallel: bool = False
    cp_balance: bool = True
    cp_exchange: str = "auto"
    expert_dispatcher: Callable[..., Any] | str | None = None
    float8: str | None = None
    chunked_loss: int | None = None
    loss_kernel: str = "torch"
    enable_async_tensor_parallel: bool = False
    activation_checkpointing: bool | str | list[str] = False
    activation_checkpointing_scope: str | list[str] = "all"
    activation_offload: bool = False
    patch_is_packed_sequence: bool = False
    enable_compile: bool = False
    compile_backend: str = "inductor"
    compile_dynamic: bool | None = None
    autocast_dtype: torch.dtype | str | None = None

    @classmethod
    def chosen(cls, config: Self | None) -> Self:
        """Return ``config``, or all defaults where it is ``None``.

        Raises:
            TypeError: for another class: switches that it lacks would silently be off, or at other defaults.
        """
        if config is None or isinstance(config, cls):
            return config or cls()
        example = f"{cls.__name__}(**{config!r})" if isinstance(config, dict) else f"{cls.__name__}(...)"
        raise TypeError(f"config is a {type(config).__name__}, and must be a {cls.__name__}; use config={example}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name; values are not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


Config = TypeVar("Config", bound=StageSwitches)


def changed_fields(config: StageSwitches, names: Iterable[str]) -> list[str]:
    """List the fields of ``names`` that ``config`` has, and that are not at their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    return [name for name in names if name in defaults and getattr(config, name) != defaults[name]]


def with_fields(config: Config, changes: Mapping[str, Any] | None = None, off: Iterable[str] = ()) -> Config:
    """Copy ``config`` with some ``changes``, and with the fields in ``off`` at their default.

    Fields that the class of ``config`` does not have are passed over.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    wanted = {**{name: defaults.get(name) for name in off}, **(changes or {})}
    known = {name: value for name, value in wanted.items() if name in defaults}
    return dataclasses.replace(config, **known)  # type: ignore[type-var]
