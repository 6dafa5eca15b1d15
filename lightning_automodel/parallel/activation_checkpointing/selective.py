"""What a checkpointed block saves besides its input: the results of chosen operations, and the routes of tokens."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_automodel._compat.torch.tensors import TorchDispatchMode
from lightning_automodel.config.activation_checkpointing import ALTERNATE, ATTENTION, MATMUL, ROUTING, operations_of

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""``context_fn`` of ``torch.utils.checkpoint``: the contexts of the forward pass and of the recomputation."""


SELECTIVE = (ATTENTION, ALTERNATE)
"""Attention is dear to compute again, matrix products are dear to keep: half of them."""


def saving(names: tuple[str, ...]) -> Contexts:
    """Saves the results of the operations with these names.

    Args:
        names: "attention" (kernels of any backend), "matmul", or torch's names, such as "aten.mm" or "aten.mm.default".

    Raises:
        ValueError: for an operation that torch does not have.
    """
    operations = {op for name in names for op in operations_of(name)}
    return partial(_saving_contexts, frozenset(operations), ATTENTION in names, ALTERNATE in names)


def _saving_contexts(operations: frozenset[Any], attention: bool, alternate: bool) -> tuple[Any, Any]:
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation in operations or (attention and _is_attention(operation))
        if alternate and operation in MATMUL:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _is_attention(operation: Any) -> bool:
    """Tells by its name whether an operation is a fused kernel of attention in the forward pass."""
    name = str(operation).lower()
    return any(part in name for part in ("attention", "attn")) and "backward" not in name


# ---- routes ----------------------------------------------------------------------------------------------------------


def keeping_routes() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Sends a recomputed token to the same experts, should its scores differ by a rounding error.

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
        if func in ROUTING:
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
        if func not in ROUTING:
            return result
        indices = self.routes[self.count].clone()
        self.count += 1
        return indices if isinstance(result, Tensor) else (_scores(func, args, kwargs or {}, indices), indices)


def _scores(func: Any, args: tuple, kwargs: dict[str, Any], indices: Tensor) -> Tensor:
    place = ROUTING[func]
    assert place is not None
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    scores: Tensor = args[0]
    if indices.ndim < scores.ndim:
        return scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return scores.gather(dim, indices)
