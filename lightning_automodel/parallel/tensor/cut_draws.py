"""Draws the numbers of a slice as one process does: the whole, of which a rank keeps its part."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.tensors import name_of_operation
from lightning_automodel.distributed.collectives import gather, shard_bounds
from lightning_automodel.parallel.tensor.twins import place_of_shape


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which ``length`` of ``whole`` a rank has from ``start`` on in ``dim``; per row of the batch where dim 0 is [rows
    x whole].
    """

    dim: int
    whole: int
    start: int
    length: int
    in_rows: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Take this rank's slice of ``whole``."""
        if not self.in_rows:
            return whole.narrow(self.dim, self.start, self.length)
        return whole.unflatten(0, (-1, self.whole)).narrow(1, self.start, self.length).flatten(0, 1)

    def joined(self, local: Tensor, group: ProcessGroup) -> Tensor:
        """Join the slices of all ranks."""
        if not self.in_rows:
            return gather(local, self.dim, self.whole, group)
        return gather(local.unflatten(0, (-1, self.length)), 1, self.whole, group).flatten(0, 1)

    def undo(self, local: torch.Size) -> list[int]:
        """Compute the shape on one process."""
        size = local[0] // self.length * self.whole if self.in_rows else self.whole
        return [size if i == self.dim else n for i, n in enumerate(local)]

    def fits(self, local: torch.Size) -> bool:
        """Tell whether ``local`` can be such a slice."""
        if self.in_rows:
            return local[0] % self.length == 0
        return self.dim < len(local) and local[self.dim] == self.length


WHOLE, UNKNOWN = "whole", "unknown"


def find_cut(
    whole: torch.Size,
    local: torch.Size,
    rows: int,
    group: ProcessGroup,
    tokens: int | None,
    per_row: bool | None = None,
) -> "Cut | str":
    """Find how ``local`` is cut out of ``whole``, which is equal for all ``rows`` of a batch.

    Whether its first dimension has parts for each row, ``per_row`` says. Where that is not known, one number for each
    feature is no row of the batch, but ``tokens`` of each row may be.
    """
    if whole == local:
        return WHOLE
    differing = [i for i, (w, n) in enumerate(zip(whole, local, strict=False)) if w != n]
    if len(whole) != len(local) or len(differing) != 1:
        return UNKNOWN
    dim = differing[0]
    in_rows = dim == 0 and whole[0] % rows == 0 and whole[0] > rows
    if in_rows:
        in_rows = (len(whole) > 1 or tokens in (whole[0], whole[0] // rows)) if per_row is None else per_row
    size = whole[dim] // rows if in_rows else whole[dim]
    start, length = shard_bounds(size, group.size(), group.rank())
    cut = Cut(dim=dim, whole=size, start=start, length=length, in_rows=in_rows)
    return cut if length and local[dim] == (rows * length if in_rows else length) else UNKNOWN


def draw_whole(cut: Cut, func: Any, args: tuple, kwargs: dict[str, Any], local: torch.Size, group: ProcessGroup) -> Any:
    """Draw as one process does, and cut; ``None`` where that is dear (on a device), or depends on values of other
    shapes.
    """
    first, *others = args
    device = first.device if isinstance(first, Tensor) else torch.device(kwargs.get("device") or "cpu")
    in_place = name_of_operation(func).endswith("_")
    like = isinstance(first, Tensor) and (in_place or "_like" in name_of_operation(func))
    if device.type != "cpu":
        return None
    if any(isinstance(x, Tensor) for x in others) or (isinstance(first, Tensor) and not like):
        return _of_values(cut, func, args, kwargs, local, group)
    shape = cut.undo(local)
    place = 0 if like else place_of_shape(args)
    if place is None:
        return None
    drawn = func(*args[:place], _empty_as(first, shape) if like else shape, *args[place + 1 :], **kwargs)
    return first.copy_(cut.of(drawn)) if in_place else cut.of(drawn).contiguous()


def _of_values(cut: Cut, func: Any, args: tuple, kwargs: dict[str, Any], local: torch.Size, group: ProcessGroup) -> Any:
    """Draw by values (means, chances) of all ranks, and cut what is drawn, and what is written into them."""
    slices = [x for x in args if isinstance(x, Tensor)]
    if any(x.shape != local for x in slices):
        return None
    with torch.no_grad():
        whole = [cut.joined(x, group) if isinstance(x, Tensor) else x for x in args]
        before = [x.clone() for x in whole if isinstance(x, Tensor)]
        drawn = func(*whole, **kwargs)
        after = [x for x in whole if isinstance(x, Tensor)]
        for own, old, new in zip(slices, before, after, strict=True):
            if not torch.equal(old, new):  # the noise of nn.RReLU, what an operation in place was given
                own.copy_(cut.of(new))
    if drawn is after[0]:
        return slices[0]
    results = [drawn] if isinstance(drawn, Tensor) else list(drawn)
    if any(x.shape != after[0].shape for x in results):
        return None
    parts = [cut.of(x).contiguous() for x in results]
    return parts[0] if isinstance(drawn, Tensor) else tuple(parts)


def _empty_as(like: Tensor, shape: list[int]) -> Tensor:
    """Allocate memory in the order of ``like``: numbers are drawn in the order of memory."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    empty = torch.empty([shape[i] for i in order], dtype=like.dtype, device=like.device)
    return empty.permute([order.index(i) for i in range(like.ndim)])
