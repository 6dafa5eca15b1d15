"""Makes ``save_pretrained`` of peft's models write adapters that lie on several ranks: all of them call, rank 0 writes.

Only what peft may write is gathered: what wrappers add, what trains, biases, and the tables of tokens.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel._compat.fsdp2.units import fsdp_units
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.checkpointing.hugging_face.models import name_of_code
from lightning_automodel.checkpointing.hugging_face.save_pretrained import check_alike, gather, raise_on_all
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import as_stored
from lightning_automodel.modules.structure import find_input_embedding
from lightning_automodel.modules.wrappers import TASKS, adapters_of


def install_saving_of_adapters(root: nn.Module) -> None:
    """Let ``save_pretrained`` of the models below ``root`` that hold a model and its adapters gather what it writes."""
    for module in root.modules():
        adapted = getattr(module, "peft_config", None) and hasattr(module, "save_pretrained")
        if adapted and not isinstance(module, PreTrainedModel):
            module.save_pretrained = MethodType(_save_adapters, module)  # type: ignore[assignment]


def find_prompted(root: nn.Module) -> Any | None:
    """Find peft's model below ``root`` that learns beside the layers of the model that it holds, if there is one."""
    for module in root.modules():
        configs = (getattr(module, "peft_config", None) or {}).values()
        beside = any(config.is_prompt_learning or config.is_adaption_prompt for config in configs)
        if beside and hasattr(module, "save_pretrained") and not isinstance(module, PreTrainedModel):
            return module
    return None


def save_prompts(model: Any, directory: Path) -> None:
    """Write what ``PeftModel.from_pretrained`` reads, under any strategy. All ranks call; rank 0 writes."""
    is_whole = "save_pretrained" not in vars(model)  # of which rank 0 has all
    if not is_whole or not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(directory)


def _save_adapters(
    model: Any, save_directory: str | os.PathLike, *args: Any, is_main_process: bool = True, **kwargs: Any
) -> None:
    """Write adapters to a folder, as ``PeftModel.save_pretrained`` does. Collective; rank 0 writes.

    Raises:
        ValueError: for ``path_initial_model_for_weight_conversion``, or if ranks pass different things.
        RuntimeError: if not all ranks call it, or rank 0 could not write.
    """
    if kwargs.get("path_initial_model_for_weight_conversion"):
        raise ValueError(
            "path_initial_model_for_weight_conversion reads adapters into the model, which lies on several ranks; "
            "save_pretrained(directory) without it, and convert in one process that reads what was written"
        )
    for unit in fsdp_units(model):
        unit.reshard()  # a root that is gathered has other parameters
    given = kwargs.pop("state_dict", None)
    check_alike(given, [*args, kwargs])
    whole = _gather_what_peft_writes(model) if given is None else gather(model, given)
    prompts, encoders = _prompts(model), _whole_encoders(model)

    def write() -> None:
        directory = os.fspath(save_directory)
        with name_of_code(type(model.get_base_model())), _saved_prompts(model, prompts), _in_place(encoders):
            type(model).save_pretrained(model, directory, *args, is_main_process=True, state_dict=whole, **kwargs)

    raise_on_all(write if dist.get_rank() == 0 else lambda: None)


def _gather_what_peft_writes(model: Any) -> dict[str, Any]:
    wanted = {id(parameter) for parameter in adapters_of(model)}
    wanted |= {id(parameter) for table in _tables(model) for parameter in table.parameters()}
    frozen = {id(p) for n, p in model.named_parameters() if not (p.requires_grad or n.endswith("bias"))} - wanted
    state = model.state_dict(keep_vars=True)
    return {name: gather_on_rank_zero(as_stored(value)) for name, value in state.items() if id(value) not in frozen}


def _prompts(model: Any) -> dict[str, Tensor]:
    """Compute what prompt encoders save, which they compute: every rank calls them, as it does in training."""
    kinds = {name: config.peft_type for name, config in model.peft_config.items() if config.is_prompt_learning}
    with torch.no_grad():
        return {name: model.get_prompt_embedding_to_save(name) for name, kind in kinds.items() if kind != TASKS}


def _whole_encoders(model: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Gather on rank 0 the parameters of encoders that peft writes as they stand: where they hang, and values there."""
    names = [name for name, config in model.peft_config.items() if config.peft_type == TASKS]
    tables: list[dict[str, Any]] = [
        own_parameters(part) for name in names for part in model.prompt_encoder[name].modules()
    ]
    return [
        (table, {name: gather_on_rank_zero(as_stored(p)) for name, p in table.items() if p is not None})
        for table in tables
    ]


@contextmanager
def _in_place(encoders: list[tuple[dict[str, Any], dict[str, Any]]]) -> Generator[None, None, None]:
    """Let parameters be whole within this context; on rank 0."""
    before = [dict(table) for table, _ in encoders]
    for table, values in encoders:
        table.update({name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})
    try:
        yield
    finally:
        for (table, _), parameters in zip(encoders, before, strict=True):
            table.update(parameters)


@contextmanager
def _saved_prompts(model: Any, prompts: Mapping[str, Tensor]) -> Generator[None, None, None]:
    """Let ``model`` find ``prompts`` within this context where peft asks it to compute them."""
    computes = model.get_prompt_embedding_to_save
    model.get_prompt_embedding_to_save = lambda name: prompts[name] if name in prompts else computes(name)
    try:
        yield
    finally:
        del model.get_prompt_embedding_to_save


def _tables(model: Any) -> list[nn.Module]:
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        return []
    return [table for table in (find_input_embedding(base), base.get_output_embeddings()) if table is not None]
