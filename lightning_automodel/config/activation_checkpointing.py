"""The values of the fields that choose what is checkpointed, and what a checkpointed block saves."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_automodel._compat.torch.tensors import GROUPED_MM, OpOverload, OpOverloadPacket

MODES = ("full", "selective", "submodule")
SCOPES = ("all", "language", "vision", "audio", "multimodal")

Mode = bool | str | Sequence[str]
Scope = str | Sequence[str]

ATTENTION, ALTERNATE = "attention", "every second matmul"
"""What a block may save that is no fixed set of operations."""

_ATEN = torch.ops.aten
MATMUL = {_ATEN.mm.default, _ATEN.addmm.default, GROUPED_MM}
# what chooses experts, and the place of its argument `dim` (in the schema; None: the indices are all it gives)
ROUTING = {
    _ATEN.topk.default: 2,
    _ATEN.sort.default: 1,
    _ATEN.sort.stable: 1,
    _ATEN.max.dim: 1,
    _ATEN.argmax.default: None,
    _ATEN.multinomial.default: None,
}
_GROUPS: dict[str, set[Any]] = {"matmul": MATMUL, "routing": set(ROUTING), ATTENTION: set(), ALTERNATE: set()}


def check_checkpointing(mode: Mode, scope: Scope, offload: bool) -> None:
    """Checks the values of the three fields of a config.

    Raises:
        ValueError: for a mode, scope or operation that does not exist, or for a field that would do nothing.
    """
    if not isinstance(mode, bool | str | Sequence):
        raise ValueError(
            f"activation_checkpointing={mode!r}: use True, False, {', '.join(MODES)}, or a list of operations"
        )
    if isinstance(mode, str) and mode not in MODES:
        raise ValueError(
            f"activation_checkpointing={mode!r} is not one of {', '.join(MODES)}, True or False; to choose what is "
            "saved give a list, such as ['attention', 'matmul'] or ['aten.mm']"
        )
    if not isinstance(mode, bool | str):
        for name in mode:
            operations_of(name)  # raises for what does not exist
    if unknown := sorted(set(scopes_of(scope)) - set(SCOPES)):
        raise ValueError(f"activation_checkpointing_scope={unknown[0]!r} is not one of {', '.join(SCOPES)}")
    if not mode and (scopes_of(scope) != ["all"] or offload):
        field = "activation_offload" if offload else "activation_checkpointing_scope"
        raise ValueError(f"{field} does nothing without checkpointing; set activation_checkpointing='full' too")


def scopes_of(scope: Scope) -> list[str]:
    """Returns the field's one scope, or its several, as a list."""
    return [scope] if isinstance(scope, str) else list(scope)


def operations_of(name: str) -> set[Any]:
    """Finds the overloads of torch that ``name`` means: "matmul", "routing", "aten.mm" or "aten.mm.default".

    Raises:
        ValueError: for an operation that torch does not have.
    """
    if name in _GROUPS:
        return _GROUPS[name]
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        found = getattr(found, part, None)
    if isinstance(found, OpOverload):
        return {found}
    if isinstance(found, OpOverloadPacket):
        return {getattr(found, overload) for overload in found.overloads()}
    raise ValueError(
        f"activation_checkpointing has {name!r}, which is no operation of torch; write 'attention', 'matmul' or a name "
        "such as 'aten.mm'"
    )
