"""Weights of one family through files: read into shards and written from them, bit by bit as plain transformers."""

import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import modeling_utils

from lightning_automodel.checkpointing.files.dcp import Held, fetch, list_tensors, write_tensors
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.finetuning.export import write_sharded
from lightning_automodel.loading import sharded_loading
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import select_plan
from tests.support.families import tiny_model
from tests.support.files import CPU, read

Sizes = Mapping[str, int]
LAYOUTS: Mapping[int, list[Sizes]] = {2: [{"tp": 2}, {"dp_shard": 2}], 4: [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4}]}
"""By the number of ranks."""
NARROW = torch.bfloat16


@dataclass
class Weights:
    """What is not bit by bit the same; empty: all is.

    Attributes:
        read: tensors that ``from_pretrained`` under sharded loading reads differently from plain ``from_pretrained``.
        written: tensors that plain ``from_pretrained`` reads differently from files (or a checkpoint of another
            layout) that were written from shards.
    """

    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


def all_read(families: Sequence[str], directory: Path) -> list[str]:
    """Runs on every rank: what of each family, in float32, is read differently into shards; nothing is written.

    The ranks read one after the other: a collective while they read would never end.
    """
    problems = []
    for family in families:
        if dist.get_rank() == 0:
            randomized(tiny_model(family)).save_pretrained(directory / family, max_shard_size="200KB")
        dist.barrier()
        plain = _load(family, directory / family)
        for sizes in _layouts(_has_plan(family)):
            with taking_turns(directory / family / _name(sizes)):
                model = load_sharded(family, directory / family, sizes)
            problems += [f"{family}, {_name(sizes)}: {name}" for name in _together(unequal(model, plain))]
    return problems


@contextmanager
def taking_turns(directory: Path) -> Generator[None, None, None]:
    """Within this context a rank reads files when all ranks before it are through."""
    original = modeling_utils.convert_and_load_state_dict_in_model
    rank = dist.get_rank()

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        while rank and not (directory / str(rank - 1)).exists():
            time.sleep(0.005)
        result = original(*args, **kwargs)
        (directory / str(rank)).mkdir(parents=True)
        return result

    modeling_utils.convert_and_load_state_dict_in_model = in_turn
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = original


def weights(family: str, planned: bool | None, directory: Path) -> Weights:
    """Runs on every rank: a family in float32 on each layout, a checkpoint of the first on the last, and narrow files.

    Args:
        family: its model type.
        planned: whether it has a plan; ``None``: to be found.
        directory: empty, and shared by the ranks.
    """
    layouts = _layouts(_has_plan(family) if planned is None else planned)
    _, problem = _attempt(lambda: save(family, directory) if dist.get_rank() == 0 else None)
    if problem:
        return Weights(read=[problem], written=[problem])
    found, models = Weights(), []
    plain = _load(family, directory / "wide")
    for sizes in layouts:
        models.append(_round_trip(family, directory / "wide", sizes, None, plain, found))
    if len(layouts) > 1 and models[0] is not None and models[-1] is not None:
        label = f"checkpoint of {_name(layouts[0])} on {_name(layouts[-1])}: "
        _, problem = _attempt(lambda: _reshard(models[0], models[-1], directory / "checkpoint"))
        found.written += [label + x for x in ([problem] if problem else _together(unequal(models[-1], plain)))]
    if dist.get_world_size() == 2:
        plain = _load(family, directory / "narrow")
        _round_trip(family, directory / "narrow", layouts[0], NARROW, plain, found)
    return found


def _layouts(planned: bool) -> list[Sizes]:
    return [sizes for sizes in LAYOUTS[dist.get_world_size()] if planned or "tp" not in sizes]


def save(family: str, directory: Path) -> None:
    """Writes a model in which no value is one that initialization would give, in float32 and in bfloat16."""
    model = randomized(tiny_model(family))
    model.save_pretrained(directory / "wide", max_shard_size="200KB")
    model.to(NARROW).save_pretrained(directory / "narrow")


def randomized(model: nn.Module) -> Any:
    """The model with random numbers in every parameter and in every buffer that is stored."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif isinstance(tensor, Tensor):
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    return model


def _round_trip(
    family: str, files: Path, sizes: Sizes, dtype: torch.dtype | None, plain: nn.Module, found: Weights
) -> Any:
    """Reads ``files`` into shards and writes them again, in ``dtype``; returns the model, if it could be read."""
    label = f"{_name(sizes)}{'' if dtype is None else f', {dtype} files read as float32'}: "
    model, problem = _attempt(lambda: load_sharded(family, files, sizes))
    if problem:
        found.read.append(label + problem)
        return None
    found.read += [label + name for name in _together(unequal(model, plain))]
    target = files.with_name(f"{files.name} {_name(sizes)}")
    _, problem = _attempt(lambda: write_sharded(model, target, dtype=dtype, max_shard_size="300KB"))
    if not problem:
        reread = (lambda: unequal(_load(family, target), plain)) if dist.get_rank() == 0 else list
        names, problem = _attempt(reread)
    found.written += [label + text for text in ([problem] if problem else _together(names))]
    return model


def _reshard(model: nn.Module, other: nn.Module, folder: Path) -> None:
    """Brings the weights of ``model`` through a checkpoint to ``other``, which is on another layout."""
    write_tensors({name: Held.of(t, name) for name, t in _tensors(model).items()}, Location.of(str(folder)))
    for tensor in _tensors(other).values():
        local_tensor(tensor).zero_()
    stored = list_tensors(Location.of(str(folder)), weights_only=True)
    fetch([(tensor, stored[name]) for name, tensor in _tensors(other).items()])


def load_sharded(family: str, directory: Path, sizes: Sizes) -> Any:
    """Runs on every rank: ``from_pretrained`` into a model that is made parallel first, in float32."""
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        return _load(family, directory)


def _load(family: str, directory: Path) -> Any:
    torch.manual_seed(dist.get_rank())  # no draw may matter
    return read(family, directory, dtype=torch.float32)


def unequal(actual: nn.Module, expected: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ in any bit, in dtype or in shape. Collective for shards."""
    values, found = _tensors(expected), _tensors(actual)
    names = sorted(values.keys() ^ found.keys())
    for name in [name for name in values if name in found]:
        tensor = found[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not _same(whole, values[name].detach()):
            names.append(name)
    return names


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _name(sizes: Sizes) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def _attempt(function: Any) -> tuple[Any, str]:
    """What ``function`` returns, and what went wrong on any rank: all ranks know, and none waits for another."""
    result, problem = None, ""
    try:
        result = function()
    except Exception as error:  # whatever is raised is the result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {first[:200]} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return result, next((text for text in problems if text), "")


def _together(names: list[str]) -> list[str]:
    """What any rank found."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return sorted({name for some in found for name in some})


def _has_plan(family: str) -> bool:
    try:
        select_plan(tiny_model(family))
    except ValueError:
        return False
    return True
