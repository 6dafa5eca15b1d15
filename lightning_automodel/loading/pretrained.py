"""Reads pretrained weights into a model that is made parallel first: each rank reads its own part.

``from_pretrained`` under :func:`sharded_loading`::

    transformers builds on meta -> our parallelize -> transformers reads, for each DTensor, the rank's slices
                                                   -> what the files lack is drawn whole, equal on all ranks, and sliced
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.transformers.loading import (
    LoadingSteps,
    empty_loading_info,
    forget_conversions,
    patched_pretrained_loading,
    reports_on_rank_zero,
)
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.loading.host_offload import home_of, move
from lightning_automodel.loading.initialize import initialize_missing, unread_tables
from lightning_automodel.loading.placeholders import broadcast_object, copy_among_replicas, reserve
from lightning_automodel.loading.quantized import becomes_plain, refuse_quantized, share_forms
from lightning_automodel.loading.read_values import note_values
from lightning_automodel.loading.safetensors import SlicedFile, float_dtypes
from lightning_automodel.loading.shard_operation import ExactShardOperation, convert, set_parameter
from lightning_automodel.loading.whole_values import on_shards
from lightning_automodel.modules.adapted_bases import note_files
from lightning_automodel.modules.four_bit import describe, four_bit_layers, store_as_rows
from lightning_automodel.modules.structure import class_names, holds, is_kept_in_float32

Parallelize = Callable[[PreTrainedModel], Any]


@contextmanager
def sharded_loading(
    parallelize: Parallelize,
    device: torch.device,
    replicas: ProcessGroup | None = None,
    is_restored: Callable[[PreTrainedModel], bool] | None = None,
) -> Generator[None, None, None]:
    """Calls ``parallelize`` between building on meta and reading weights of ``from_pretrained``, within this context.

    Args:
        parallelize: makes the model parallel in place, ties included.
        device: where each rank's parameters and the buffers go; shards that wait on the host do not.
        replicas: ranks that hold the same (shards, or the whole model); the first reads and sends it to the others.
        is_restored: whether a checkpoint will overwrite all weights of a model, which are then not read.
    """
    with patched_pretrained_loading(_ShardedLoading(parallelize, device, replicas, is_restored).steps()):
        yield


class _ShardedLoading:
    """Steps of ``from_pretrained`` that shard a model before its weights are read.

    The states of one model::

        on meta, whole  --load-->  on meta, sharded  --transformers reads-->  files' values, and gaps on meta
                                         | a checkpoint, or another replica, brings the values: reserved memory
                                         v
        all values  <--initialize-- gaps drawn whole and sliced  <-------------- what nobody brings
            |
            +--finalize-->  ties checked, equal on all replicas, on its device

    See :func:`sharded_loading` for the arguments.
    """

    def __init__(
        self,
        parallelize: Parallelize,
        device: torch.device,
        replicas: ProcessGroup | None,
        is_restored: Callable[[PreTrainedModel], bool] | None,
    ) -> None:
        self.parallelize, self.device = parallelize, device
        self.replicas, self.is_restored = replicas, is_restored
        self.ties: dict[PreTrainedModel, list[list[str]]] = {}
        """Of models that are being loaded: the names of each parameter that has several."""
        self.asked: dict[PreTrainedModel, dict[str, torch.dtype]] = {}
        """Of those models: the dtypes that ``from_pretrained`` was asked for, of parameters that are stored wider."""
        self.unread: set[PreTrainedModel] = set()
        """Those whose values a checkpoint brings: nothing of them is as in files."""

    def steps(self) -> LoadingSteps:
        """List the steps for transformers to call."""
        return LoadingSteps(
            load=on_shards(self.load),
            initialize=on_shards(self.initialize),
            finalize=on_shards(self.finalize),
            convert=convert,
            set_parameter=set_parameter,
            shard_operation=ExactShardOperation,
            dtensor_like=dtensor_like,
            open_file=SlicedFile,
        )

    def load(
        self,
        original: Callable,
        model: PreTrainedModel,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Shard ``model``, and read its weights unless they come from elsewhere."""
        files = checkpoint_files
        _refuse_adapters(model, load_config.pretrained_model_name_or_path)
        if not becomes_plain(load_config.hf_quantizer):
            refuse_quantized(model)
        store_as_rows(model)
        for parameter in model.parameters():  # transformers makes new ones of what it reads, whatever was frozen before
            parameter.requires_grad_(parameter.is_floating_point())
        self.ties[model] = tie_groups(_tie(model))
        asked = {name: p.dtype for name, p in model.named_parameters() if not is_kept_in_float32(model, name)}
        self.parallelize(model)
        home = home_of(model, self.device)
        is_quantized = getattr(model, "is_quantized", False)  # checkpoints do not say all of four-bit weights
        if self.is_restored is not None and not is_quantized and self.is_restored(model):
            reserve(model, home)
            self.unread.add(model)
            return empty_loading_info(), None
        settings = replace(load_config, device_map={"": home})

        def read() -> Any:
            self.asked[model] = _stored_wider(model, asked, float_dtypes(files) if files else {torch.float64})
            return original(model, state_dict, files, settings, *args, **kwargs)

        if self.replicas is not None and self.replicas.rank() != 0:
            return self._receive(model, home, self.replicas)
        _warn_of_pickles(files)
        return read() if self.replicas is None else _read_and_tell(read, self.replicas)

    def _receive(self, model: PreTrainedModel, home: torch.device, replicas: ProcessGroup) -> Any:
        """Make memory for what the first replica reads."""
        result = _agree(None, None, replicas)
        reserve(model, home, missing=result[0].missing_and_mismatched())
        return result

    def initialize(self, original: Callable, model: PreTrainedModel, *args: Any) -> None:
        """Give values to what the files lack."""
        tables = unread_tables(model)
        initialize_missing(model, lambda: original(model, *args), home_of(model, self.device), tables)

    def finalize(self, original: Callable, model: PreTrainedModel, load_config: Any, info: Any, *args: Any) -> Any:
        """Send what was read to the other replicas, and check that ties held."""
        loaded = set(model.state_dict()) - info.missing_and_mismatched()
        with reports_on_rank_zero():
            result = original(model, replace(load_config, device_map={"": home_of(model, self.device)}), info, *args)
        if becomes_plain(load_config.hf_quantizer):
            forget_conversions(model)
        note_files(model, () if model in self.unread else loaded)
        ties = self.ties.pop(model, [])
        read = loaded.union(*(names for names in ties if not loaded.isdisjoint(names)))
        _round(model, self.asked.pop(model, {}), read)
        if self.replicas is not None:
            copy_among_replicas(model, sorted(loaded), self.replicas)
            share_forms(model, partial(broadcast_object, group=self.replicas))
        move(model, self.device)
        for _, module, form in four_bit_layers(model):
            describe(module, form)  # torch makes new tensors where it moves DTensors
        note_values(model)
        _check_ties(model, ties)
        return result


def _stored_wider(model: nn.Module, asked: dict[str, torch.dtype], files: set[torch.dtype]) -> dict[str, torch.dtype]:
    """Keep those dtypes that round what the files hold, and what ``model`` stores by now."""
    stored = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    floats = {name: dtype for name, dtype in asked.items() if name in stored}
    exact = {dtype for dtype in set(floats.values()) if all(holds(dtype, found) for found in files)}
    return {name: dtype for name, dtype in floats.items() if dtype not in exact and not holds(dtype, stored[name])}


def _round(model: nn.Module, asked: dict[str, torch.dtype], read: set[str]) -> None:
    """Let parameters that were read have values of the dtype that was asked for, as on one device.

    transformers reads in the dtype of the parameter, which the precision of the trainer says. Where files have digits
    that what was asked for has not, these would train here, and not where a model is read before it is cast.
    """
    with torch.no_grad():
        for name in asked.keys() & read:
            local = local_tensor(model.get_parameter(name))
            local.copy_(local.to(asked[name]))


def _read_and_tell(read: Callable[[], Any], replicas: ProcessGroup) -> Any:
    """Read, and send the report, or the error, to the replicas that wait for it."""
    try:
        result = read()
    except Exception as error:
        return _agree(None, error, replicas)
    return _agree(result, None, replicas)


def _agree(result: Any, error: Exception | None, replicas: ProcessGroup) -> Any:
    """Returns on all replicas what the first one found, or raises on all."""
    result, failure = broadcast_object((result, error and repr(error)), replicas)
    if failure is not None:
        raise error or RuntimeError(f"the process that reads the weights for this one failed: {failure}")
    return result


def _refuse_adapters(model: PreTrainedModel, source: Any) -> None:
    """Refuse adapters that transformers reads into a model which it has read, and which is sharded by now.

    Raises:
        ValueError: naming the way through peft.
    """
    if getattr(model, "peft_config", None):
        raise ValueError(
            f"{source} holds an adapter (adapter_config.json), which transformers would read into a "
            f"{class_names(model)[0]} that is sharded already. Move the adapter's files into a folder of their own, or "
            "give the folder of its base (base_model_name_or_path); then call peft.PeftModel.from_pretrained(base, the "
            "adapter's folder) behind from_pretrained, or give both to CausalLM (model, peft)"
        )


def _warn_of_pickles(files: list[str] | None) -> None:
    if files and not files[0].endswith(".safetensors"):
        warn_once(
            f"{files[0]} is a pickled file, which every rank opens as a whole (memory-mapped where the file allows); "
            "write it once more with save_pretrained, as safetensors, and each rank reads its slices only"
        )


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Groups the names of parameters that are one and the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: PreTrainedModel) -> PreTrainedModel:
    """Ties parameters before sharding, which must know; transformers does it after loading."""
    model.tie_weights(recompute_mapping=False)
    return model


def _check_ties(model: PreTrainedModel, groups: list[list[str]]) -> None:
    for names in groups:
        if len({id(model.get_parameter(name)) for name in names}) > 1:
            raise ValueError(
                f"{' and '.join(names)} of {type(model).__name__} are tied by its config, but the checkpoint holds "
                "different values for them; pass a config with tie_word_embeddings=False"
            )
