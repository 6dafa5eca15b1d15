"""Keeps process groups and meshes from one trainer to the next: each has threads and sockets, and is made once.

::

    trainer 1   keep("mesh 2 x 2", make)  makes it
    trainer 2   keep("mesh 2 x 2", make)  returns it, if all ranks ended trainer 1 alike
    trainer 3   keep("mesh 1 x 4", make)  makes another one

Where ranks ended differently, a collective that one of them has not joined would meet the first one of the next run:
there all are destroyed, on all ranks, before the next run begins.
"""

import hashlib
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel._compat.torch.groups import existing_groups, forget_equal_meshes, forget_groups_of, has_groups

Kept = TypeVar("Kept", DeviceMesh, ProcessGroup)

_kept: dict[Hashable, DeviceMesh | ProcessGroup] = {}
_made: list[ProcessGroup] = []
_world: list[ProcessGroup] = []
_IN_STEP, _OUT_OF_STEP = 0, -1
_ending = [_IN_STEP]


def keep(key: Hashable, make: Callable[[], Kept]) -> Kept:
    """Return what ``make`` gave for ``key`` since the processes met, or call it. Collective where ``make`` is."""
    _notice_world()
    if key not in _kept:
        before = existing_groups()
        with gloo_in_order():
            _kept[key] = make()
        _made.extend(existing_groups() - before)
    return _kept[key]  # type: ignore[return-value]


def note_failure(error: BaseException, where: str, *, is_of_backend: bool) -> None:
    """Note how this rank ended a run, for :func:`begin_run`.

    Args:
        error: that ended it. The same one on all ranks leaves them in step, unless it came at any moment (a signal).
        where: the step in which it came.
        is_of_backend: whether a collective raised it.
    """
    if is_of_backend or not isinstance(error, Exception):
        _ending[0] = _OUT_OF_STEP
    else:
        digest = hashlib.blake2b(f"{where} {type(error)} {error}".encode(), digest_size=7).digest()
        _ending[0] = int.from_bytes(digest, "big") + 1


def begin_run(device: torch.device) -> None:
    """Destroy the kept groups if some rank ended the last run out of step with the others. Collective."""
    _notice_world()
    ending, _ending[0] = _ending[0], _IN_STEP
    if dist.get_world_size() == 1:
        return
    found = torch.tensor([ending, -ending, ending == _OUT_OF_STEP], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    most, least, is_out_of_step = found.tolist()
    if is_out_of_step or most != -least:
        _destroy()


def check_groups(mesh: DeviceMesh, name: str) -> None:
    """Check that the groups of the mesh on which the module ``name`` was made parallel were not destroyed.

    Raises:
        ValueError: if they were.
    """
    if not has_groups(mesh):
        raise ValueError(
            f"{name} was made parallel in a run that ended differently on different ranks, and whose process groups "
            "were destroyed; build a new LightningModule, and go on from a checkpoint"
        )


def _notice_world() -> None:
    """Forget what was kept when the group of all processes has ended: the others ended with it."""
    world = dist.group.WORLD
    assert world is not None, "the processes have not met"
    if not _world or _world[0] is not world:
        _kept.clear()
        _made.clear()
        _world[:] = [world]
        forget_equal_meshes()
        _ending[0] = _IN_STEP


def _destroy() -> None:
    living = existing_groups()
    for group in _made:
        if group in living:  # a user may have destroyed it
            dist.destroy_process_group(group)
    for kept in _kept.values():
        if isinstance(kept, DeviceMesh):
            forget_groups_of(kept)
    forget_equal_meshes()
    _kept.clear()
    _made.clear()
