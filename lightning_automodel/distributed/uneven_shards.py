"""Tensors of which ranks hold parts that no DTensor placement describes: rows of slices, of uneven counts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel._compat.tensors import wrapper_tensor
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

    For checkpoints: it can be detached, gathered and stored, not computed with.
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
        if func is torch.ops.aten.detach.default:
            return Fragment(args[0].local, args[0].partition)
        raise TypeError(f"{func} of a part of a tensor that other ranks hold too; gather it first")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fragment({tuple(self.local.shape)} of {tuple(self.shape)})"


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
    """Returns ``optimizer.state_dict()`` with fragments."""
    state = optimizer.state_dict()
    if not state:
        return {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[Any, Any] = {}
    for key, values in state["state"].items():
        is_of_parameter = type(key) is int  # an optimizer may keep more: optimizer.state["k"]
        found[key] = map_tensors(values, partial(like_parameter, parameters[key])) if is_of_parameter else values
    return {**state, "state": found}


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Call ``function`` with each tensor of a nest of dicts, lists and tuples, and return the same nest of results."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is dict:  # others, such as a Counter, mean more than their items
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if type(tree) is list or type(tree) is tuple:
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def complete_state(optimizer: Optimizer) -> None:
    """Gives a rank whose part of a parameter is empty the states that the others have. Collective over all ranks.

    An optimizer passes over what has no gradient there: it makes no state, and does not count steps.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, PARTITION)]
    mine = {i: _template(p, optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state and _held(p)}
    all_of_them: list[dict[int, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    known = {i: template for each in all_of_them for i, template in each.items()}
    for i, parameter in enumerate(parameters):
        if i in known and not _held(parameter):
            state = optimizer.state[parameter]
            for key, value in known[i].items():
                if value is None:
                    state.setdefault(key, torch.zeros_like(parameter))
                else:
                    state[key] = value.to(parameter.device) if _is_elsewhere(value, state.get(key)) else value


def _is_elsewhere(value: Any, before: Any) -> bool:
    """Tell whether a state came on another device than before: scalars travel through host memory."""
    return isinstance(value, Tensor) and isinstance(before, Tensor) and before.device != value.device


def _held(parameter: Tensor) -> bool:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().numel() > 0


def _template(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a state's partition; ``None`` for what lies as the parameter does."""

    def of(value: Any) -> Any:
        if isinstance(value, DTensor) and value.shape == parameter.shape:
            return None
        return value.cpu() if isinstance(value, Tensor) else value

    return {key: of(value) for key, value in state.items()}
