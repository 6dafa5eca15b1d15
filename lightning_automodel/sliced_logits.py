"""Logits that are cut on the vocabulary, as a tensor that the usual loss takes."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from lightning_automodel.loss import cross_entropy

_SIGNATURE = inspect.signature(functional.cross_entropy)
_WAYS_OUT = (
    "use lightning_automodel.loss.gather_logits(logits) for whole ones, or the functions beside it, which take slices"
)


class SlicedLogits(DTensor):
    """A DTensor for which ``torch.nn.functional.cross_entropy`` beside plain labels is right, and gathers nothing.

    torch refuses plain tensors beside DTensors; where it does that here, the error says what to do instead.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            given = _SIGNATURE.bind(*args, **kwargs)
            given.apply_defaults()
            if not isinstance(given.arguments["target"], DTensor):
                return _cross_entropy(**given.arguments)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            name = getattr(func, "__name__", func)
            raise TypeError(f"{name} was called with logits that are cut on the vocabulary; {_WAYS_OUT}") from error
        return _sliced(result) if type(result) is DTensor else result


def join_slices(local: Tensor, mesh: DeviceMesh, size: int) -> SlicedLogits:
    """The slices [..., vocab / tp] that the ranks of ``mesh`` (one axis) hold of ``size`` logits, as one tensor."""
    shape = torch.Size((*local.shape[:-1], size))
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(local.ndim - 1)]
    return _sliced(DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride))


def _sliced(tensor: DTensor) -> SlicedLogits:
    tensor.__class__ = SlicedLogits  # the same data and graph: DTensors are made by torch's own functions only
    return tensor  # type: ignore[return-value]


def _cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """torch's arguments: ``input`` is [tokens, vocab], or [batch, vocab, ...] as torch has it for more dimensions."""
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        raise TypeError(
            "cross_entropy of logits that are cut on the vocabulary takes ids, ignore_index, label_smoothing and "
            f"reduction, but not weight, size_average, reduce or probabilities; {_WAYS_OUT}"
        )
    logits = input.movedim(1, -1) if input.ndim > 2 else input
    return cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
