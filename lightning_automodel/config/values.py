"""What fields of the configs may be: names from YAML become objects of torch; impossible values are errors."""

import dataclasses
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.config.imports import import_class_from_path

EXCHANGES = ("auto", "gather", "all_to_all")
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LOSS_KERNELS = {
    "torch": ("", ""),
    "liger": ("liger_kernel", "liger-kernel"),
    "cut_cross_entropy": ("cut_cross_entropy", "cut-cross-entropy"),
}
"""Name of the module and of the package, by what ``FSDP2Config.loss_kernel`` calls them."""
EXTENDS, OWN_PLAN = "extends", "model"
"""Key of a ``tp_plan`` that completes or overrides another plan and does not replace it, and the name of that plan."""
NONFINITE = ("error", "skip", "ignore")
"""What may happen to a step whose loss or gradients are NaN or infinite."""
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


def check_switches(config: Any) -> None:
    """Refuses what is neither ``True`` nor ``False`` in the fields of a config that are on or off: "no" would be on."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{field.name}={value!r} is neither on nor off; use True or False")


def check_tp_plan(plan: Any) -> None:
    """Refuses what cannot be a plan; its rules are checked with the model."""
    if plan is not None and not isinstance(plan, str | Mapping):
        raise ValueError(
            f"tp_plan={plan!r} is a {type(plan).__name__}; use a dict of name pattern to style, such as "
            '{"model.layers.*.mlp.up_proj": "colwise"}, or the import path of one'
        )
    if not isinstance(plan, Mapping):
        return
    if not plan:
        raise ValueError("tp_plan={} has no rules; None stands for the model's own plan")
    if plan.get(EXTENDS, OWN_PLAN) != OWN_PLAN:
        raise ValueError(
            f"tp_plan={{{EXTENDS!r}: {plan[EXTENDS]!r}}}: the only plan that a plan can extend is the model's own: "
            f"{{{EXTENDS!r}: {OWN_PLAN!r}}}"
        )
    for rule, style in plan.items():
        if not isinstance(rule, str) or not isinstance(style, str | ParallelStyle):
            kind = style if isinstance(style, type) else type(style)
            instance = f": {kind.__name__}()" if issubclass(kind, ParallelStyle) else ""
            raise ValueError(
                f"tp_plan={{{rule!r}: {style!r}}}: a rule is a name pattern and a style, which is a name such as "
                f"'colwise', or an instance of torch's ParallelStyle{instance}"
            )


def check_resharding(reshard: Any) -> None:
    """Check the field ``reshard_after_forward`` of a config: ``None``, a bool or a number of ranks.

    Raises:
        ValueError: for anything else.
    """
    if reshard is not None and (not isinstance(reshard, int) or (reshard < 1 and reshard is not False)):
        raise ValueError(
            f"reshard_after_forward={reshard!r}: use True or False, a number of ranks that keep a copy of the "
            "parameters together, or None for all blocks but the last"
        )


def check_compile(enabled: bool, backend: str, dynamic: bool | None) -> None:
    """Refuse compile options without ``enable_compile=True``, where nothing would read them."""
    if not enabled and (backend, dynamic) != ("inductor", None):
        raise ValueError("compile_backend and compile_dynamic do nothing without enable_compile=True")


def check_nonfinite(policy: str) -> None:
    """Checks the field ``nonfinite`` of a config.

    Raises:
        ValueError: for a policy that does not exist.
    """
    if policy not in NONFINITE:
        raise ValueError(f"nonfinite={policy!r} is not one of {', '.join(map(repr, NONFINITE))}")


def check_exchange(exchange: str) -> None:
    """Refuses an exchange of context parallelism that does not exist."""
    if exchange not in EXCHANGES:
        raise ValueError(f"cp_exchange={exchange!r} is not one of {', '.join(EXCHANGES)}")


def resolve_dispatcher(dispatcher: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    """Imports what brings tokens to experts.

    Raises:
        ValueError: if there is nothing at the path, or nothing that can be called.
    """
    found = import_class_from_path(dispatcher) if isinstance(dispatcher, str) else dispatcher
    if found is not None and not callable(found):
        raise ValueError(f"expert_dispatcher={dispatcher!r} is a {type(found).__name__}, and cannot be called")
    return found


def check_count(name: str, value: Any, of: str, example: int) -> None:
    """Refuses what is neither ``None`` nor a number of something."""
    if value is not None and type(value) is not int:
        raise TypeError(f"{name}={value!r} must be a whole number of {of}, such as {example}, or None")
    if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be at least 1 of {of}; None turns it off")


def check_loss(chunked_loss: int | None, loss_kernel: str) -> None:
    """Refuses chunks without tokens and kernels that do not exist."""
    check_count("chunked_loss", chunked_loss, "tokens", 1024)
    if loss_kernel not in LOSS_KERNELS:
        raise ValueError(f"loss_kernel={loss_kernel!r} is not one of {', '.join(LOSS_KERNELS)}")


def check_autocast(dtype: torch.dtype | None) -> None:
    """Check the field ``autocast_dtype`` of a config.

    Raises:
        ValueError: for a dtype to which autocast does not cast.
    """
    if dtype is not None and dtype not in _AUTOCAST_DTYPES:
        raise ValueError(
            f"autocast_dtype={dtype} is not one of {', '.join(map(str, _AUTOCAST_DTYPES))}; None turns it off"
        )


def check_recipe(recipe: str | None) -> None:
    """Check the field ``float8`` of a config.

    Raises:
        ValueError: for a recipe that torchao does not have, or if it is not installed.
    """
    if recipe is None:
        return
    if recipe not in FLOAT8_RECIPES:
        raise ValueError(f"float8={recipe!r} is not one of torchao's recipes {', '.join(FLOAT8_RECIPES)}")
    if find_spec("torchao") is None:
        raise ValueError(f"float8={recipe!r} needs the package torchao: pip install lightning_automodel[float8]")


def resolve_mp_policy(policy: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """Turns the fields of a policy, with dtypes as names such as ``"bfloat16"``, into FSDP2's object.

    Raises:
        ValueError: for what is no policy, and for a field or a dtype that does not exist.
    """
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy
    if not isinstance(policy, Mapping):
        raise ValueError(
            f"mp_policy={policy!r} is no policy; use MixedPrecisionPolicy(param_dtype=torch.bfloat16), or its fields: "
            '{"param_dtype": "bfloat16", "reduce_dtype": "float32"}'
        )
    known = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    if unknown := set(policy) - known:
        raise ValueError(
            f"mp_policy has no field {', '.join(sorted(unknown))}; its fields are {', '.join(sorted(known))}"
        )
    fields: dict[str, Any] = {k: resolve_dtype(v) if k.endswith("dtype") else v for k, v in policy.items()}
    return MixedPrecisionPolicy(**fields)


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Converts ``"bfloat16"`` or ``"torch.bfloat16"`` to the dtype of that name.

    Raises:
        ValueError: if torch has no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch; write for example 'bfloat16' or 'float32'")
    return found


def resolve_offload_policy(policy: OffloadPolicy | Mapping[str, Any] | bool | None) -> CPUOffloadPolicy | None:
    """Turns ``True``, or the fields of a policy from YAML, into FSDP2's object; ``None``: everything on the device.

    Raises:
        ValueError: for anything else, and for a field that does not exist.
    """
    if policy is None or policy is False or type(policy) is OffloadPolicy:
        return None
    if isinstance(policy, CPUOffloadPolicy):
        return policy
    if policy is True:
        return CPUOffloadPolicy()
    if not isinstance(policy, Mapping):
        raise ValueError(
            f"offload_policy={policy!r} is no policy; use True, or FSDP2's CPUOffloadPolicy(pin_memory=...)"
        )
    if unknown := set(policy) - {"pin_memory"}:
        raise ValueError(f"offload_policy has no field {', '.join(sorted(unknown))}; its field is pin_memory")
    return CPUOffloadPolicy(**policy)
