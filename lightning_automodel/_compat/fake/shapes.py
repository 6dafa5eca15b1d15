"""Private names of torch for a memory of operations on tensors without memory that costs less than torch's own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


class Shapes(FakeTensorMode):
    """torch's mode, quicker where all shapes are numbers: it remembers operations by what dense tensors have.

    Nearly all operations of a model with several alike layers are remembered, so this is what most of the time goes to.
    """

    def _prep_args_for_hash(self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]) -> None:
        result.append((type(args), len(args)))
        if isinstance(args, dict):
            result += args
            args = args.values()
        for arg in args:
            if isinstance(arg, FakeTensor) and arg.constant is None and arg.layout is torch.strided:
                result += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device)
                result += (arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_conj(), arg.is_neg())
            elif isinstance(arg, list | tuple | dict):
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, [arg], state, id_hashed_objects)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, *others: Any) -> Any:
        known, args = entry.metadata, others[-1]  # before torch 2.15 the function stands between the key and these
        if known is None or known.is_conj or known.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, *others)
        storage = None if entry.view_idx is None else args[entry.view_idx].untyped_storage()
        with in_kernel_invocation_manager(self):
            found = torch.empty_strided(
                known.shape, known.stride, dtype=known.dtype, device="meta", requires_grad=known.requires_grad
            )
            if storage is not None:
                found.set_(storage, known.storage_offset, known.shape, known.stride)
        return FakeTensor(self, found, known.device)


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` has no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def all_selected(indices: Sequence[Any]) -> list[Any]:
    """Replace masks by as many places as they have: what a mask selects is not known, at most all."""
    places: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            places += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            places.append(index)
    return places


def tensors_are_fake() -> bool:
    """Tell whether tensors that are made now have no memory."""
    return isinstance(torch.empty(0), FakeTensor)
