"""Reads the files that a base below adapters was loaded from, as the run read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

from lightning_automodel.checkpointing.hugging_face.models import INDEX, floating_dtype
from lightning_automodel.modules.structure import is_kept_in_float32


def tensors_of_base(source: str, model: PreTrainedModel, dtype: torch.dtype | None = None) -> Callable[[str], Tensor]:
    """Read tensors of the directory or hub name that a base was loaded from, by names of ``model`` (no adapters).

    One at a time where the files have the same names and plain numbers; else (experts that the model fuses, MXFP4, FP8)
    the model is read as a whole. They come as the run had them, which need not store what it read in the dtype of the
    files.

    Args:
        source: directory, or name on the hub.
        model: as its config describes it, with the dtype of the run, and plain weights.
        dtype: what will be written; what is merged is rounded to it at the end only.

    Raises:
        ValueError: if there is no such directory any more.
    """
    try:
        read = _reader_of_base(source, model)
    except OSError as error:
        raise ValueError(f"the base {source!r} of the adapters cannot be read: {error}") from error
    of_run = None if model.config.dtype is None else floating_dtype(str(model.config.dtype))
    wide = of_run if of_run is None or dtype is None else torch.promote_types(of_run, dtype)

    def read_as_run(name: str) -> Tensor:
        tensor = read(name)
        if of_run is None or not tensor.is_floating_point() or is_kept_in_float32(model, name, of_run):
            return tensor
        return tensor.to(of_run).to(wide)

    return read_as_run


def _reader_of_base(source: str, model: PreTrainedModel) -> Callable[[str], Tensor]:
    form = _form_of_files(source, model)
    files = {} if form else _files_by_name(Path(source))  # numbers of few bits have the names of weights, too
    files |= {name: files[twin] for name, twin in model.all_tied_weights_keys.items() if twin in files}
    if files and all(name in files for name in model.state_dict() if name not in model.all_tied_weights_keys):
        twins = model.all_tied_weights_keys
        return lambda name: _read(files[name], twins.get(name, name))
    return type(model).from_pretrained(source, dtype="auto", **form).state_dict().__getitem__


def _form_of_files(source: str, model: PreTrainedModel) -> dict[str, Any]:
    """Return the argument of ``from_pretrained`` that makes plain numbers of quantized files; none of plain ones."""
    values, _ = model.config.get_config_dict(source)
    fields = values.get("quantization_config")
    if fields is None:
        return {}
    return {"quantization_config": AutoQuantizationConfig.from_dict({**fields, "dequantize": True})}


def _files_by_name(directory: Path) -> dict[str, Path]:
    if (index := directory / INDEX).is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (single := directory / "model.safetensors").is_file():
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)
