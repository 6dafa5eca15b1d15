"""Converts a checkpoint, on one process without a GPU: to Hugging Face's format, or to one plain Lightning file."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from lightning_automodel.checkpointing.files.dcp import StoredTensor
from lightning_automodel.checkpointing.files.reading import read_sound
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.hugging_face.adapters import (
    merged,
    warn_of_what_is_not_merged,
    warn_of_what_stays_behind,
    with_adapters,
    write_adapters,
)
from lightning_automodel.checkpointing.hugging_face.base_files import tensors_of_base
from lightning_automodel.checkpointing.hugging_face.description import Description, descriptions_of
from lightning_automodel.checkpointing.hugging_face.models import (
    floating_dtype,
    parse_size,
    remove_adapters,
    write_pretrained,
)
from lightning_automodel.checkpointing.hugging_face.own_code import Classes, classes_beside
from lightning_automodel.checkpointing.names import prefixes_of
from lightning_automodel.checkpointing.states import are_equal, clean_name
from lightning_automodel.distributed.logs import log, logger
from lightning_automodel.modules.ties import untie
from lightning_automodel.modules.wrappers import name_without_wrappers, without_wrappers

_MAPPED = 1 << 20  # bytes; larger tensors lie in files while they are collected


def export(
    checkpoint: str,
    output: str,
    model: str | None = None,
    tokenizer: str | None = None,
    model_config: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "2GB",
    weights_only: bool = True,
    merge: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes the model of a checkpoint as a directory that from_pretrained and inference engines read.

    Where the checkpoint is of adapters, a directory that PeftModel.from_pretrained reads.

    Args:
        checkpoint: folder, file or URL, of any strategy and layout.
        output: directory; made if it does not exist.
        model: name of the model in the LightningModule, where it holds several.
        tokenizer: directory or hub name, of the processor of a model that reads more than text; by default where the
            model was loaded from.
        model_config: directory with the model's config.json, for checkpoints that other tools wrote.
        dtype: of the weights, for example bfloat16; by default as in the checkpoint.
        max_shard_size: of a file, and what is in memory at most (unless one block is larger).
        weights_only: refuse pickled objects in the checkpoint, which can run code.
        merge: adapters are added to the layers that they adapt, and the whole model is written.
        overwrite: replace what is in the directory.
        trust_remote_code: run the code that comes with a model, or with a tokenizer.
    """
    directory = Path(output)
    if directory.is_file():
        raise ValueError(f"{output} is a file; give a directory")
    if not overwrite and directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{output} is not empty; give another directory, or --overwrite=true to replace what it holds")
    parse_size(max_shard_size)
    kind = None if dtype is None else floating_dtype(dtype)
    path = Location.of(checkpoint)
    content = read_sound(path, weights_only)
    description = _choose(content, model, model_config, path)
    classes = classes_beside(description.architecture, description.config, description.source, trusts=trust_remote_code)
    found = _read_tokenizer(tokenizer or description.source, tokenizer is not None, trust_remote_code)
    state = {clean_name(name): value for name, value in content["state_dict"].items()}
    if description.adapters:
        _export_adapters(description, classes, state, directory, merge, kind, max_shard_size)
    else:
        built = description.build(classes)
        prefix = _prefix(built, description, model, state, path)
        _untie_unlike(built, prefix, state)
        write_pretrained(built, lambda name: _whole(state[prefix + name]), directory, kind, max_shard_size)
    if merge or not description.adapters:
        remove_adapters(directory)
    if found is not None:
        found.save_pretrained(directory)
    log(f"wrote {directory}: {description.architecture}, {_listed(directory)}")


def consolidate(checkpoint: str, file: str, weights_only: bool = True, overwrite: bool = False) -> None:
    """Writes a checkpoint folder as one plain Lightning file, which any Trainer reads.

    Args:
        checkpoint: folder or URL.
        file: what to write, when it is complete.
        weights_only: refuse pickled objects in the checkpoint, which can run code.
        overwrite: replace a file that is there.
    """
    path, target = Location.of(checkpoint), Location.of(file)
    if target.is_folder():
        raise ValueError(f"{file} is a folder; give the name of a file")
    if not overwrite and target.is_file():
        raise ValueError(f"{file} is there already; give another name, or --overwrite=true to replace it")
    content = read_sound(path, weights_only)
    with tempfile.TemporaryDirectory(dir=target.parent.path if target.is_local else None) as directory:
        tensors: dict[StoredTensor, Tensor] = {}
        content["optimizer_states"] = [_numbered(state) for state in content.get("optimizer_states", [])]
        if not content["optimizer_states"]:
            del content["optimizer_states"]
        try:
            TorchCheckpointIO().save_checkpoint(_loaded(content, Path(directory), tensors), str(target))
        except (OSError, RuntimeError) as error:
            raise OSError(f"{target} could not be written from {path}: {error}") from error
    log(f"wrote {target}: {target.size() / 1e6:,.1f} MB")


# ---- export ----------------------------------------------------------------------------------------------------------


def _choose(content: Mapping[str, Any], name: str | None, config: str | None, path: Location) -> Description:
    if config is not None:
        return replace(Description.of_directory(Path(config)), name=name or "")
    found = descriptions_of(content)
    names = ", ".join(repr(description.name) for description in found)
    if not found:
        raise ValueError(
            f"{path} does not say which model it holds; add --model_config DIRECTORY, with its config.json"
        )
    if name is None and len(found) > 1:
        raise ValueError(f"{path} holds the models {names}; choose one with --model NAME")
    chosen = [description for description in found if name in (None, description.name)]
    if not chosen:
        raise ValueError(f"{path} holds no model {name!r}; it holds {names}")
    return chosen[0]


def _prefix(
    model: PreTrainedModel, description: Description, name: str | None, state: Mapping[str, Any], path: Location
) -> str:
    """Finds what stands before the model's names in the checkpoint."""
    needed = [name for name in model.state_dict() if name not in model.all_tied_weights_keys]
    prefix = f"{description.name}." if description.name else ""
    if all(prefix + name in state for name in needed):
        return prefix
    if found := prefixes_of(needed, state):
        return _only(found, name, description.architecture, path)
    missing = [name for name in needed if prefix + name not in state]
    raise ValueError(
        f"{path} lacks {len(missing)} of {len(needed)} weights of {type(model).__name__}, for example "
        f"{prefix + missing[0]}; it may be partial (adapters, or parts that were left out), or of another model"
    )


def _only(found: list[str], name: str | None, architecture: str, path: Location) -> str:
    """Take the one prefix that is meant: that of the model ``name``, or the only one."""
    named = [prefix for prefix in found if name is None or f".{prefix}".endswith(f".{name}.")]
    if len(named) == 1:
        return named[0]
    names = ", ".join(repr(prefix.removesuffix(".")) for prefix in found)
    if not named:
        raise ValueError(f"{path} holds no {architecture} {name!r}; it holds {names}")
    raise ValueError(f"{path} holds several {architecture}, {names}; choose one with --model NAME")


def _untie_unlike(model: PreTrainedModel, prefix: str, state: Mapping[str, Any]) -> None:
    """Untie what is tied by the config and was trained apart, as other tools do that break ties."""
    unlike = [
        name
        for name, twin in model.all_tied_weights_keys.items()
        if {prefix + name, prefix + twin} <= state.keys() and not are_equal(state[prefix + name], state[prefix + twin])
    ]
    if unlike:
        log(f"{prefix}{unlike[0]} has values of its own in the checkpoint, and is written apart: the config ties it")
        untie(model, unlike)


def _export_adapters(
    description: Description,
    classes: Classes | None,
    state: Mapping[str, Any],
    directory: Path,
    merge: bool,
    dtype: Any,
    max_shard_size: str,
) -> None:
    """Write adapters as peft's directory, or ``merge`` them into the base, read from its source if not stored."""
    model = with_adapters(description, classes)
    prefix = f"{description.name}." if description.name else ""

    def fetch(name: str) -> Tensor:
        if prefix + name in state:
            return _whole(state[prefix + name])
        return base(name_without_wrappers(name))

    if not merge:
        stored = [name for name, _ in model.named_parameters() if prefix + name in state]
        warn_of_what_stays_behind(model, description, stored)  # what is as in files is in no checkpoint
        write_adapters(model, description, fetch, directory)
        return
    warn_of_what_is_not_merged(description)
    base = tensors_of_base(description.source, description.build(classes), dtype)
    fetch_merged = merged(model, fetch)
    with without_wrappers(model):
        write_pretrained(model, fetch_merged, directory, dtype=dtype, max_shard_size=max_shard_size)


def _whole(value: StoredTensor | Tensor) -> Tensor:
    return value.load() if isinstance(value, StoredTensor) else value


def _read_tokenizer(source: str, is_wanted: bool, trusts: bool) -> Any:
    """Read the tokenizer, or the processor of a model that reads more than text; before anything is written.

    Returns:
        ``None`` with a warning where there is none, and it was not asked for by name.
    """
    try:
        if not source:
            raise ValueError("the checkpoint does not say where the model came from")
        with suppress(OSError, ValueError, ImportError):  # for images, the packages that read them
            return AutoProcessor.from_pretrained(source, trust_remote_code=trusts)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        if is_wanted:
            raise ValueError(f"tokenizer={source!r} cannot be loaded: {error}") from error
        logger.warning("no tokenizer is written (%s); add --tokenizer DIRECTORY to have one", error)
        return None


def _listed(directory: Path) -> str:
    """List files with their sizes."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    others = ", ".join(path.name for path in files if path not in weights)
    total = sum(path.stat().st_size for path in weights)
    return f"{total / 1e6:,.1f} MB of weights in {len(weights)} {'file' if len(weights) == 1 else 'files'}, {others}"


# ---- consolidate -----------------------------------------------------------------------------------------------------


def _numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers parameters in the order of the groups, as ``optimizer.state_dict()`` does."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {**optimizer, "state": {number.get(n, n): s for n, s in optimizer["state"].items()}, "param_groups": groups}


def _loaded(tree: Any, directory: Path, known: dict[StoredTensor, Tensor]) -> Any:
    """Loads the tensors of a tree; large ones are mapped from files of ``directory``."""
    if type(tree) is dict:
        return {key: _loaded(value, directory, known) for key, value in tree.items()}
    if type(tree) is list:
        return [_loaded(value, directory, known) for value in tree]
    if not isinstance(tree, StoredTensor):
        return tree
    if tree not in known:
        tensor = tree.load()
        size = tensor.numel() * tensor.element_size()
        if size > _MAPPED:
            path = directory / str(len(known))
            tensor.contiguous().flatten().view(torch.uint8).numpy().tofile(path)  # a full disk is an error here
            tensor = torch.from_file(str(path), size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        known[tree] = tensor
    return known[tree]
