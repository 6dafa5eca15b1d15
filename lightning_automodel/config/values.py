"""What fields of the configs may be: names from YAML become objects of torch; impossible values are errors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.kernels import LOSS_KERNELS


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
    for rule, style in plan.items() if isinstance(plan, Mapping) else ():
        if not isinstance(rule, str) or not isinstance(style, str | ParallelStyle):
            kind = style if isinstance(style, type) else type(style)
            instance = f": {kind.__name__}()" if issubclass(kind, ParallelStyle) else ""
            raise ValueError(
                f"tp_plan={{{rule!r}: {style!r}}}: a rule is a name pattern and a style, which is a name such as "
                f"'colwise', or an instance of torch's ParallelStyle{instance}"
            )


def check_resharding(reshard: Any) -> None:
    """Refuses what FSDP2 does not take."""
    if reshard is not None and (not isinstance(reshard, int) or (reshard < 1 and reshard is not False)):
        raise ValueError(
            f"reshard_after_forward={reshard!r}: use True or False, a number of ranks that keep a copy of the "
            "parameters together, or None for all blocks but the last"
        )


def check_compile(enabled: bool, backend: str, dynamic: bool | None) -> None:
    """Refuses choices for a compilation that does not happen."""
    if not enabled and (backend, dynamic) != ("inductor", None):
        raise ValueError("compile_backend and compile_dynamic do nothing without enable_compile=True")


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
    """``"bfloat16"`` or ``"torch.bfloat16"`` to the dtype of that name.

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
