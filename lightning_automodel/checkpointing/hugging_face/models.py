"""Writes a model in Hugging Face's format: shard by shard, so that no process holds more than one shard of it.

::

    name of our parameter -> whole tensor (gathered, or read from a checkpoint) -> transformers' names on disk -> shard

Names on disk can differ from ours in number and shape (experts that the model fuses lie apart in files), but never
across blocks, so that a block at a time is converted.
"""

import copy
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from lightning_automodel._compat.transformers.loading import (
    forget_conversions,
    revert_weight_conversion,
    was_dequantized,
)
from lightning_automodel.modules.structure import (
    class_names,
    find_blocks,
    is_kept_in_float32,
    name_in_source,
    outermost,
)
from lightning_automodel.modules.ties import untied_names

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_OF_ADAPTERS = (ADAPTER_CONFIG, *ADAPTER_WEIGHTS)
"""For which ``from_pretrained`` looks first: it reads the base that these name, and not the model beside them."""
Fetch = Callable[[str], Tensor | None]


def parse_size(size: int | str) -> int:
    """Converts "2GB" or "500MB" (powers of ten), or a number, to bytes.

    Raises:
        ValueError: for anything else.
    """
    factors = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    text = str(size).strip().upper()
    number, factor = (text[:-2], factors[text[-2:]]) if text[-2:] in factors else (text, 1)
    try:
        result = int(float(number) * factor)
    except ValueError:
        result = 0
    if result <= 0:
        raise ValueError(f"max_shard_size={size!r} is not a size; give for example 2GB or 500MB")
    return result


def remove_adapters(directory: Path) -> None:
    """Remove the files of an adapter, in whose place a whole model is written."""
    for name in _OF_ADAPTERS:
        (directory / name).unlink(missing_ok=True)


def holds_adapters(directory: Path) -> bool:
    """Tell whether ``from_pretrained`` would find an adapter in ``directory``."""
    return (directory / ADAPTER_CONFIG).is_file()


def floating_dtype(name: str) -> torch.dtype:
    """Converts "bfloat16" to ``torch.bfloat16``.

    Raises:
        ValueError: for a name that is no floating-point dtype of torch.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is no floating-point dtype; give for example bfloat16 or float32")
    return dtype


def write_pretrained(
    model: PreTrainedModel,
    fetch: Fetch,
    directory: Path | None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "2GB",
    variant: str | None = None,
) -> None:
    """Writes weights, config and generation config to ``directory``, which ``from_pretrained`` then loads.

    Args:
        model: gives names, ties, conversions and configs; its parameters may be on the meta device or sharded.
        fetch: returns the whole tensor of a name of ``model.state_dict()`` (or ``None`` where ``directory`` is).
            Called once for each, in the same order in every process, so that it may be collective.
        directory: made if it does not exist; weights in it are replaced once all are written. ``None``: this process
            takes part in ``fetch`` and writes nothing.
        dtype: of floating-point tensors in the files, but for what the model keeps in float32 beside it, as
            ``from_pretrained`` does (the bias that chooses experts, say); ``None``: as they come.
        max_shard_size: bytes of a file, or text such as "2GB"; what the writing process holds at most, unless one block
            is larger.
        variant: stands in the names of files, as ``from_pretrained`` expects it.
    """
    limit = parse_size(max_shard_size)
    if was_dequantized(model):
        forget_conversions(model)
    shards = None if directory is None else _Shards(directory, limit, variant)
    dtypes: set[torch.dtype] = set()
    for names in group_names(model):
        fetched = {name: fetch(name) for name in names}
        if shards is not None:
            tensors = {name: _cast(model, name, t, dtype) for name, t in fetched.items() if t is not None}
            dtypes.update(t.dtype for t in tensors.values() if t.is_floating_point())
            for name, tensor in revert_weight_conversion(model, tensors).items():
                shards.add(name, tensor)
    if shards is not None:
        shards.finish()
        _write_configs(model, shards.directory, dtype or (dtypes.pop() if len(dtypes) == 1 else model.dtype))


def group_names(model: PreTrainedModel) -> Iterator[list[str]]:
    """Group names of tensors that are converted together: those of a block, else of a module. Ties appear once."""
    blocks, untied = list(find_blocks(model)), untied_names(model)
    groups: dict[str, list[str]] = {}
    for name in model.state_dict():
        if name not in model.all_tied_weights_keys or name in untied:
            groups.setdefault(outermost(blocks, name) or name.rpartition(".")[0], []).append(name)
    yield from groups.values()


def _cast(model: PreTrainedModel, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32 if dtype.itemsize < 4 and is_kept_in_float32(model, name, dtype) else dtype)


@contextmanager
def name_of_code(kind: type) -> Generator[None, None, None]:
    """Give ``kind`` the name that its source has, which libraries write into configs."""
    name, kind.__name__ = kind.__name__, name_in_source(kind)
    try:
        yield
    finally:
        kind.__name__ = name


def _write_configs(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [class_names(model)[0]]
    config.dtype = str(dtype).removeprefix("torch.")
    if model.is_remote_code():
        with name_of_code(type(model)):
            custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


class _Shards:
    """Collects tensors into files, which get their names when their number is known."""

    def __init__(self, directory: Path, limit: int, variant: str | None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.stem, self.index = ("model", INDEX) if variant is None else (f"model.{variant}", _with(variant, INDEX))
        self.directory = directory
        self.limit = limit
        self.waiting: dict[str, Tensor] = {}
        self.written: list[list[str]] = []
        self.total = 0
        for leftover in directory.glob("*.safetensors.part"):
            leftover.unlink()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, and write a file first if it would not fit into that any more."""
        if self.waiting and _bytes(self.waiting.values()) + _bytes([tensor]) > self.limit:
            self._write()
        self.waiting[name] = tensor.detach().cpu().contiguous()
        self.total += _bytes([tensor])

    def finish(self) -> None:
        """Write the last file and the index, and remove the files of an earlier export."""
        if self.waiting:
            self._write()
        kept = [f"{self.stem}.safetensors", f"{self.stem}-?????-of-?????.safetensors", self.index]
        for old in [path for pattern in kept for path in self.directory.glob(pattern)]:
            old.unlink()
        count = len(self.written)
        names = [f"{self.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = [f"{self.stem}.safetensors"]
        for i, name in enumerate(names):
            self._part(i).rename(self.directory / name)
        if count > 1:
            table = {tensor: name for name, tensors in zip(names, self.written, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": table}
            (self.directory / self.index).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        file = self._part(len(self.written))
        try:
            save_file(self.waiting, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            file.unlink(missing_ok=True)
            raise OSError(f"{file} could not be written: {error}; what the directory held before is there") from error
        self.written.append(list(self.waiting))
        self.waiting = {}

    def _part(self, index: int) -> Path:
        return self.directory / f"model-{index + 1:05d}.safetensors.part"


def _with(variant: str, name: str) -> str:
    """Put ``variant`` into a file name as transformers does: ``model.safetensors.index.fp16.json``."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
