"""Makes ``save_pretrained`` of a model that lies on several ranks write what it writes of a whole one.

All ranks call it, as they call the model: the parts go to rank 0, which writes one shard before it asks for the next.
What a user adds to the weights (a state dict, adapters of transformers, an upload) is gathered as a whole, and written
by transformers.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel._compat.fsdp2.units import fsdp_units
from lightning_automodel._compat.transformers.models import saves_more_than_weights
from lightning_automodel.checkpointing.hugging_face.models import (
    group_names,
    name_of_code,
    parse_size,
    write_pretrained,
)
from lightning_automodel.distributed.barrier import meet
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import Fragment, as_stored, like_parameter
from lightning_automodel.modules.four_bit import four_bit_layers
from lightning_automodel.modules.structure import class_names

_ROOT = "_model_that_was_made_parallel"
_NAME = "save_pretrained"
_ON_ALL_RANKS = (
    "the model lies on all ranks, so call it on every one, without `if trainer.is_global_zero` around it; rank 0 alone "
    "writes"
)
_WRITING = "it is still writing"


def install_saving(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model``, and of the models of transformers inside, gather what it writes."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module)[_ROOT] = model
            module.save_pretrained = MethodType(_save_pretrained, module)  # type: ignore[method-assign]


def write_sharded(model: PreTrainedModel, directory: Path | None, **options: Any) -> None:
    """Write a model whose parameters lie on several ranks: all of them call, rank 0 writes, block by block.

    Args:
        model: of any strategy, or whole.
        directory: for rank 0; ``None``: nothing is written.
        options: of :func:`~lightning_automodel.checkpointing.hugging_face.models.write_pretrained`.

    Raises:
        RuntimeError: on the other ranks, if rank 0 could not write.
    """
    check_writable(model)
    state = model.state_dict(keep_vars=True)
    if not dist.is_initialized():
        write_pretrained(model, lambda name: state[name].detach().cpu(), directory, **options)
        return
    unfetched = [name for names in group_names(model) for name in names]

    def fetch(name: str) -> Tensor | None:
        unfetched.remove(name)
        return gather_on_rank_zero(as_stored(state[name]))

    def write() -> None:
        write_pretrained(model, fetch, directory if dist.get_rank() == 0 else None, **options)

    raise_on_all(write, lambda: [fetch(name) for name in list(unfetched)])


def check_writable(model: PreTrainedModel) -> None:
    """Check that files of transformers can hold the weights of ``model``.

    Raises:
        ValueError: if they are rows of four bits.
    """
    name = next((name for name, _, _ in four_bit_layers(model)), None)
    if name is not None and not getattr(model, "peft_config", None):
        raise ValueError(
            f"{name} of {class_names(model)[0]} is quantized to four bits, and lies in memory otherwise than files of "
            "bitsandbytes have it; what trains is in checkpoints, and the base in the files that it was read from"
        )


def _save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    token: str | bool | None = None,
    save_peft_format: bool = True,
    save_original_format: bool = True,
    distributed_checkpoint: bool = False,
    **kwargs: Any,
) -> None:
    """Write the model to a folder, as ``PreTrainedModel.save_pretrained`` does. Collective; rank 0 writes.

    Raises:
        ValueError: for ``distributed_checkpoint=True``, or if ranks pass different things.
        RuntimeError: if not all ranks call it, or rank 0 could not write.
    """
    _check_options(distributed_checkpoint, max_shard_size)
    check_writable(model)
    for unit in fsdp_units(vars(model)[_ROOT]):
        unit.reshard()  # a root that is gathered has other parameters
    check_alike(state_dict, [max_shard_size, variant, save_original_format, push_to_hub])
    if state_dict is None and not push_to_hub and save_original_format and not saves_more_than_weights(model):
        target = Path(save_directory) if is_main_process else None
        write_sharded(model, target, max_shard_size=max_shard_size, variant=variant)
        return
    whole = gather(model, model.state_dict() if state_dict is None else state_dict)
    given = (push_to_hub, max_shard_size, variant, token, save_peft_format, save_original_format)
    write = partial(type(model).save_pretrained, model, save_directory, is_main_process, whole, *given, **kwargs)

    def write_on_first() -> None:
        if dist.get_rank() == 0:
            with name_of_code(type(model)):
                write()

    raise_on_all(write_on_first)


def _check_options(distributed_checkpoint: bool, max_shard_size: int | str) -> None:
    if distributed_checkpoint:
        raise ValueError(
            "save_pretrained(distributed_checkpoint=True): use trainer.save_checkpoint, which writes a part per rank"
        )
    parse_size(max_shard_size)


def gather(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Gather whole tensors on rank 0; those that the model ties stay one. Collective over those that are sharded."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, DTensor | Fragment):
            held = parameters.get(name, value)
            value = gather_on_rank_zero(like_parameter(held, value))
            twin = whole.get(first.setdefault(id(held), name))
            if twin is not None and value is not None and twin.equal(value):
                value = twin  # transformers writes tensors that share memory once
        whole[name] = value
    return whole


def check_alike(state_dict: Mapping[str, Any] | None, arguments: list[Any]) -> None:
    """Check that all ranks are here, and will gather the same tensors.

    Raises:
        RuntimeError: if ranks do not come.
        ValueError: if they pass different things.
    """
    sharded = [name for name, value in (state_dict or {}).items() if isinstance(value, DTensor | Fragment)]
    notes = meet(_NAME, json.dumps([*map(str, arguments), state_dict is None, sharded]), _ON_ALL_RANKS)
    if len(set(notes)) > 1:
        raise ValueError(
            f"{_NAME}: ranks pass different arguments, {notes[0][:200]} on rank 0 and "
            f"{next(note for note in notes if note != notes[0])[:200]} elsewhere; pass the same on all of them, a "
            "state_dict with the same sharded tensors included"
        )


def raise_on_all(write: Callable[[], None], drain: Callable[[], Any] = lambda: None) -> None:
    """Call ``write``; if it fails on rank 0, the others get to know. ``drain`` takes what they still send."""
    error: Exception | None = None
    try:
        write()
    except Exception as raised:
        error = raised
        drain()
    notes = meet(f"the end of {_NAME}", "" if error is None else f"{type(error).__name__}: {error}", _WRITING)
    if error is not None:
        raise error
    failed = {rank: note for rank, note in enumerate(notes) if note}
    if failed:
        raise RuntimeError(f"{_NAME} failed on another rank: {failed}")
