"""Tensors of which ranks hold parts that no DTensor placement describes: rows of slices, of uneven counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map_only
from lightning_automodel._compat.torch.tensors import wrapper_tensor
from lightning_automodel.distributed.boxes import Box

PARTITION = "_partition_of_lightning_automodel"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which rank holds which boxes of a tensor.

    Attributes:
        shape: of the whole tensor.
        mine: what this rank holds.
        holders: ranks that hold the whole tensor between them, and what each holds; every part once.
        copies: how many ranks hold what this one holds.
        index: the place of this rank among them.
    """

    shape: torch.Size
    mine: Sequence[Box]
    holders: Sequence[tuple[int, Sequence[Box]]]
    copies: int
    index: int


class Fragment(Tensor):
    """This rank's memory of a tensor with a :class:`Partition`; its shape is that of the whole tensor.

    For checkpoints: it can be detached, gathered and stored. What is computed element by element, of numbers and of
    fragments of one partition, is a fragment; nothing else is.
    """

    local: Tensor
    partition: Partition

    @staticmethod
    def __new__(cls, local: Tensor, partition: Partition) -> "Fragment":
        """Wraps ``local`` without a copy."""
        self = wrapper_tensor(cls, partition.shape, dtype=local.dtype, device=local.device)
        self.local, self.partition = local, partition
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        partition = next(tensor.partition for tensor in tensors if isinstance(tensor, Fragment))
        if _is_elementwise(func) and all(_fits(tensor, partition) for tensor in tensors):
            local_args, local_kwargs = tree_map_only(Fragment, lambda part: part.local, (args, kwargs or {}))
            return Fragment(func(*local_args, **local_kwargs), partition)
        raise TypeError(f"{func} of a part of a tensor that other ranks hold too; gather it first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fragment({tuple(self.local.shape)} of {tuple(self.shape)})"


_COPIES = ("detach", "clone", "_to_copy")


def _is_elementwise(func: Any) -> bool:
    """Tell whether ``func`` makes a new tensor, of which each element is that of those at its place, without draws."""
    name, draws = func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags
    return name in _COPIES or (torch.Tag.pointwise in func.tags and not name.endswith("_") and not draws)


def _fits(tensor: Tensor, partition: Partition) -> bool:
    return tensor.partition is partition if isinstance(tensor, Fragment) else tensor.ndim == 0


def set_partition(parameter: Tensor, partition: Partition) -> None:
    """Lets checkpoints see ``parameter``, a DTensor, as this rank's part of a larger tensor."""
    setattr(parameter, PARTITION, partition)


def as_stored(tensor: Tensor) -> Tensor:
    """Returns what checkpoints see of a parameter: a fragment that shares its memory, or the detached tensor."""
    return like_parameter(tensor, tensor)


def like_parameter(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns a state of ``parameter``'s shape as a fragment, if the parameter is one; others detached."""
    partition = getattr(parameter, PARTITION, None)
    if partition is None or value.shape != parameter.shape or not isinstance(value, DTensor):
        return value.detach()
    with torch.no_grad():
        return Fragment(value.to_local(), partition)


def stored_state(optimizer: Optimizer) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with fragments, and with what a class or a hook of a user's adds to it.

    Raises:
        ValueError: if a sharded tensor stands elsewhere than in the states of parameters, or these have another form.
    """
    state = optimizer.state_dict()
    if not state:
        return {}
    _check_form(optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[Any, Any] = {}
    for key, values in state["state"].items():
        is_of_parameter = type(key) is int  # an optimizer may keep more: optimizer.state["k"]
        found[key] = map_tensors(values, partial(like_parameter, parameters[key])) if is_of_parameter else values
    return {**state, "state": found}


def _check_form(optimizer: Optimizer, state: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        raise ValueError(
            f"{kind}.state_dict() has {', '.join(map(repr, state))} and no {missing[0]!r}, so a checkpoint cannot tell "
            "which state is of which parameter; let it return that of torch.optim.Optimizer (an optimizer around "
            "another: keep all states in self.state[parameter]), with entries beside it for numbers of its own"
        )
    for key, value in state.items():
        if key != "state" and any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise ValueError(
                f"{kind}.state_dict()[{key!r}] holds a sharded tensor, and a checkpoint does not know of which "
                "parameter it is a state; keep it in self.state[parameter]"
            )


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Call ``function`` with each tensor of a nest of containers, and return the same nest of results."""
    return tree_map_only(Tensor, function, tree)


@dataclass(frozen=True)
class _Described:
    """A tensor of a state, for ranks that lack it.

    Attributes:
        value: in host memory; ``None`` for what lies as the parameter does.
        dtype: of the tensor.
        is_on_host: it was there before.
    """

    value: Tensor | None
    dtype: torch.dtype
    is_on_host: bool


def complete_state(optimizer: Optimizer) -> None:
    """Gives a rank whose part of a parameter is empty the states that the others have. Collective over all ranks.

    An optimizer passes over what has no gradient there: it makes no state, and does not count steps.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, PARTITION)]
    mine = {i: _describe(p, optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state and _held(p)}
    all_of_them: list[dict[int, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    known = {i: described for each in all_of_them for i, described in each.items()}
    for i, parameter in enumerate(parameters):
        if i in known and not _held(parameter):
            own = tree_map_only(_Described, partial(_beside, parameter), known[i])
            optimizer.state[parameter].update(own)


def _held(parameter: Tensor) -> bool:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().numel() > 0


def _describe(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    def of(value: Tensor) -> _Described:
        lies_alike = isinstance(value, DTensor) and value.shape == parameter.shape
        return _Described(None if lies_alike else value.cpu(), value.dtype, value.device.type == "cpu")

    return map_tensors(state, of)


def _beside(parameter: Tensor, found: _Described) -> Tensor:
    """Make a state of ``parameter``, of which this rank's part is empty, as another rank has it."""
    if found.value is None:
        return torch.zeros_like(parameter, dtype=found.dtype, requires_grad=False)
    return found.value if found.is_on_host else found.value.to(parameter.device)
