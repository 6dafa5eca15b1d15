"""What a checkpointed block saves besides its input: the results of chosen operations, and the routes of tokens."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_automodel._compat import TorchDispatchMode

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""``context_fn`` of ``torch.utils.checkpoint``: the contexts of the forward pass and of the recomputation."""

_ATEN = torch.ops.aten
_MATMUL = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN._grouped_mm.default}
# what chooses experts, and the place of its argument `dim` (in the schema; None: the indices are all it gives)
_ROUTING = {
    _ATEN.topk.default: 2,
    _ATEN.sort.default: 1,
    _ATEN.sort.stable: 1,
    _ATEN.max.dim: 1,
    _ATEN.argmax.default: None,
    _ATEN.multinomial.default: None,
}
_ATTENTION, _ALTERNATE = "attention", "every second matmul"
_GROUPS = {"matmul": _MATMUL, "routing": set(_ROUTING)}

SELECTIVE = (_ATTENTION, _ALTERNATE)
"""Attention is dear to compute again, matrix products are dear to keep: half of them."""


def saving(names: tuple[str, ...]) -> Contexts:
    """Saves the results of the operations with these names.

    Args:
        names: "attention" (kernels of any backend), "matmul", or torch's names, such as "aten.mm" or "aten.mm.default".

    Raises:
        ValueError: for an operation that torch does not have.
    """
    operations = {op for name in names if name not in (_ATTENTION, _ALTERNATE) for op in _resolve(name)}
    return partial(_saving_contexts, frozenset(operations), _ATTENTION in names, _ALTERNATE in names)


def _resolve(name: str) -> set[Any]:
    if name in _GROUPS:
        return _GROUPS[name]
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        found = getattr(found, part, None)
    if isinstance(found, torch._ops.OpOverload):
        return {found}
    if isinstance(found, torch._ops.OpOverloadPacket):
        return {getattr(found, overload) for overload in found.overloads()}
    raise ValueError(
        f"activation_checkpointing has {name!r}, which is no operation of torch; write 'attention', 'matmul' or a name "
        "such as 'aten.mm'"
    )


def _saving_contexts(operations: frozenset[Any], attention: bool, alternate: bool) -> tuple[Any, Any]:
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation in operations or (attention and _is_attention(operation))
        if alternate and operation in _MATMUL:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _is_attention(operation: Any) -> bool:
    """Fused kernels of attention in the forward pass, whoever they are from."""
    name = str(operation).lower()
    return any(part in name for part in ("attention", "attn")) and "backward" not in name


# ---- routes ----------------------------------------------------------------------------------------------------------


def keeping_routes() -> tuple[AbstractContextManager, AbstractContextManager]:
    """A token goes to the same experts when it is computed again, should its scores differ by a rounding error.

    Only the choice is kept and not the scores: models go on to write into these.
    """
    routes: list[Tensor] = []
    return _Record(routes), _Replay(routes)


class _Record(TorchDispatchMode):
    def __init__(self, routes: list[Tensor]) -> None:
        super().__init__()
        self.routes = routes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ROUTING:
            self.routes.append((result if isinstance(result, Tensor) else result[1]).clone())
        return result


class _Replay(TorchDispatchMode):
    def __init__(self, routes: list[Tensor]) -> None:
        super().__init__()
        self.routes = routes
        self.count = 0

    def __enter__(self) -> Any:
        self.count = 0  # a graph that is kept is recomputed once for each backward pass
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ROUTING:
            return result
        indices = self.routes[self.count].clone()
        self.count += 1
        return indices if isinstance(result, Tensor) else (_scores(func, args, kwargs or {}, indices), indices)


def _scores(func: Any, args: tuple, kwargs: dict[str, Any], indices: Tensor) -> Tensor:
    place = _ROUTING[func]
    assert place is not None
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    scores: Tensor = args[0]
    if indices.ndim < scores.ndim:
        return scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return scores.gather(dim, indices)
