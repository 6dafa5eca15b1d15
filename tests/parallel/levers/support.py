"""What the tests of the levers measure: bytes that a block keeps, and whether two runs give the same bits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel._compat.fsdp2.units import parameter_groups
from lightning_automodel.distributed.random_numbers import RandomNumbers
from lightning_automodel.parallel.draws.passes import draw_from

ROWS, LENGTH = 2, 20
BLOCK = 96 * (64 + 32 + 32 + 64) + 3 * 96 * 128 + 2 * 96
"""Parameters of a block of the tiny Llama."""
PAIR = BLOCK + 1
"""As a minimum of a unit: two blocks."""


def token_ids(seed: int = 0) -> Tensor:
    """Random text [rows, length] for a tiny model."""
    return torch.randint(3, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


class Kept(TorchDispatchMode):
    """Notes every storage that is made inside of ``block``, and knows which of them are still alive."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.inside = False
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        # After the hooks that gather parameters and put local tensors in their place.
        block.register_forward_pre_hook(lambda *_: setattr(self, "inside", True))
        block.register_forward_hook(lambda *_: setattr(self, "inside", False), prepend=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            given = {storage._cdata for storage in _storages((*args, *(kwargs or {}).values()))}  # views of these
            for storage in _storages(result if isinstance(result, tuple | list) else (result,)):
                if storage._cdata not in given:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        """Of the storages that are alive now; those of parameters are made outside."""
        return sum(size for ref, size in self.made.values() if not ref.expired())


def _storages(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            yield value.untyped_storage()
        elif isinstance(value, tuple | list):
            yield from _storages(value)


def kept_bytes(model: nn.Module, block: nn.Module, ids: Tensor) -> int:
    """What ``block`` keeps from its forward pass for the backward pass, its output (the input of the next) included."""
    with Kept(block) as kept:
        loss = model(input_ids=ids, labels=ids).loss
        found = kept.bytes()
    loss.backward()
    return found


def gradients(model: nn.Module, ids: Tensor, steps: int = 1) -> dict[str, Tensor]:
    """The loss and the rank's part of every gradient of ``steps`` micro-batches."""
    found: dict[str, Tensor] = {}
    draw_from(model, RandomNumbers(seed=0))
    for step in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            found[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def different(make: Callable[[], nn.Module], other: Callable[[], nn.Module], ids: Tensor) -> list[str]:
    """Names of what is not equal in every bit between the two models."""
    one, two = gradients(make(), ids, steps=2), gradients(other(), ids, steps=2)
    assert one.keys() == two.keys()
    return [name for name, value in one.items() if not torch.equal(value, two[name])]


def is_whole(unit: nn.Module) -> bool:
    """Whether FSDP2 holds memory for the unit's whole parameters, copied there already or on the way."""
    (group,) = parameter_groups(unit)
    return group.is_unsharded or group._all_gather_result is not None
