"""Lets what users draw on sharded tensors be the numbers of one process: each rank draws the whole, and keeps its part.

Noise on gradients, weights that are drawn anew, dropout of gradients::

    p.normal_()    GPU 0, state s0   -- s0 -->  draws a b c d, keeps a b;  its generator goes on
                   GPU 1, state s1   <- s0 --   draws a b c d, keeps c d;  goes on with s1, unless s1 was s0
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel._compat.dtensor.operations import handle_draws
from lightning_automodel._compat.dtensor.tensors import dtensor_from
from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map_only
from lightning_automodel.distributed.boxes import boxes_at
from lightning_automodel.distributed.random_numbers import generator_of
from lightning_automodel.distributed.shards import copy_from_whole, local_tensor


def draw_as_one_process() -> None:
    """Draw like this on all DTensors of more than one rank, from now on. torch draws each rank's part from the state
    of that rank: another number for one that is whole on several, and the same ones for parts of one.
    """
    handle_draws(_draw)


def refuse_draws(mesh: DeviceMesh) -> None:
    """Refuse draws on DTensors over ``mesh``, whose parts no placement describes, from now on."""
    _REFUSED.add(mesh)
    handle_draws(_draw)


_REFUSED: set[DeviceMesh] = set()


def _draw(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Carry out ``op``. Collective over the mesh of its first DTensor.

    Raises:
        ValueError: for one over a mesh of :func:`refuse_draws`.
    """
    like = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    name = op.overloadpacket.__name__
    if like.device_mesh in _REFUSED:
        raise ValueError(
            f"{name} on a parameter or gradient that Megatron-FSDP shards: each rank would draw for its own part, and "
            "not what one process draws; use FSDP2TPStrategy or DDPStrategy, which draw the numbers of one process"
        )
    if like.device_mesh.size() == 1:
        return NotImplemented
    needs_values = not (name.endswith("_like") or _writes(op))
    wholes = tree_map_only(
        DTensor, lambda x: _whole(x) if needs_values or x is not like else _empty(x), (args, dict(kwargs))
    )
    generator = kwargs.get("generator") or generator_of(local_tensor(like).device)
    with torch.no_grad(), _in_agreed_state(generator, like.device_mesh):
        drawn = op(*wholes[0], **wholes[1])
    if _writes(op):
        copy_from_whole(like, drawn)
        return like
    return tree_map_only(Tensor, lambda whole: _part(whole, like), drawn)


def _writes(op: Any) -> bool:
    return op.overloadpacket.__name__.endswith("_")


def _whole(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor()


def _empty(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=local_tensor(tensor).device)


def _part(whole: Tensor, like: DTensor) -> DTensor:
    """Return the part that this rank has of what is placed as ``like``; sums over ranks become whole."""
    mesh, local = like.device_mesh, torch.empty_like(local_tensor(like), dtype=whole.dtype)
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in like.placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for box in boxes_at(whole.shape, mesh.shape, placements, coordinate):
        box.of_local(local).copy_(box.of_whole(whole))
    return dtensor_from(local, mesh, placements, whole.shape, whole.stride())


@contextmanager
def _in_agreed_state(generator: torch.Generator, mesh: DeviceMesh) -> Generator[None, None, None]:
    """Draw from the state of the first rank of ``mesh``; a generator that was in another one is put back."""
    own = generator.get_state()
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    agreed = own.to(device, copy=True)
    for dim in range(mesh.ndim):
        dist.broadcast(agreed, group=mesh.get_group(dim), group_src=0)
    agreed = agreed.cpu()
    generator.set_state(agreed)
    yield
    if not torch.equal(own, agreed):
        generator.set_state(own)
