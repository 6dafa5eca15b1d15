"""Reads pretrained weights into a model that is made parallel first: each rank reads its own part.

``from_pretrained`` under :func:`sharded_loading`::

    transformers builds on meta -> our parallelize -> transformers reads, for each DTensor, the rank's slices
                                                   -> what the files lack is drawn whole, equal on all ranks, and sliced
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lightning_automodel._compat import empty_loading_info, patched_pretrained_loading, reports_on_rank_zero
from lightning_automodel._compat.dtensor import dtensor_like
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.loading.host_offload import home_of, move
from lightning_automodel.loading.initialize import initialize_missing
from lightning_automodel.loading.placeholders import copy_among_replicas, reserve, share
from lightning_automodel.loading.quantized import refuse_quantized
from lightning_automodel.loading.safetensors import SlicedFile
from lightning_automodel.loading.shard_operation import ExactShardOperation, convert, set_parameter
from lightning_automodel.loading.whole_values import on_shards
from lightning_automodel.modules.adapted_bases import note_files

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

    @on_shards
    def load(
        original: Callable, model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *args: Any
    ) -> Any:
        refuse_quantized(model)
        ties = tie_groups(_tie(model))
        parallelize(model)
        home = home_of(model, device)
        model.__dict__["_ties_of_lightning_automodel"] = ties
        if is_restored is not None and is_restored(model):
            reserve(model, home)
            return empty_loading_info(), None

        def read() -> Any:
            _warn_of_pickles(files)
            return original(model, state_dict, files, replace(load_config, device_map={"": home}), *args)

        return read() if replicas is None else _read_on_first(model, read, home, replicas)

    @on_shards
    def initialize(original: Callable, model: PreTrainedModel, *args: Any) -> None:
        initialize_missing(model, lambda: original(model, *args), home_of(model, device))

    @on_shards
    def finalize(original: Callable, model: PreTrainedModel, load_config: Any, info: Any, *args: Any) -> Any:
        loaded = set(model.state_dict()) - info.missing_and_mismatched()
        with reports_on_rank_zero():
            result = original(model, replace(load_config, device_map={"": home_of(model, device)}), info, *args)
        note_files(model, loaded)
        if replicas is not None:
            copy_among_replicas(model, sorted(loaded), replicas)
        move(model, device)
        _check_ties(model, model.__dict__.pop("_ties_of_lightning_automodel", []))
        return result

    with patched_pretrained_loading(
        load=load,
        initialize=initialize,
        finalize=finalize,
        convert=convert,
        set_parameter=set_parameter,
        shard_operation=ExactShardOperation,
        dtensor_like=dtensor_like,
        open_file=SlicedFile,
    ):
        yield


def _read_on_first(model: PreTrainedModel, read: Callable, device: torch.device, replicas: ProcessGroup) -> Any:
    result, error = None, None
    if replicas.rank() == 0:
        try:
            result = read()
        except Exception as caught:
            error = caught
    result, failure = share((result, error and repr(error)), replicas)
    if failure is not None:
        raise error or RuntimeError(f"the process that reads the weights for this one failed: {failure}")
    if replicas.rank() != 0:
        reserve(model, device, missing=result[0].missing_and_mismatched())
    return result


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
