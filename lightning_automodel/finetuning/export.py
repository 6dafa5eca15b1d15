"""Writes the trained model in Hugging Face's format when training ends."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel.checkpointing.hugging_face.adapters import (
    check_exportable,
    check_mergeable,
    merged,
    warn_of_what_is_not_merged,
    warn_of_what_stays_behind,
    with_adapters,
    write_adapters,
)
from lightning_automodel.checkpointing.hugging_face.description import (
    DESCRIPTIONS,
    Description,
    describe_models,
    descriptions_of,
)
from lightning_automodel.checkpointing.hugging_face.limits_of_peft import check_merges
from lightning_automodel.checkpointing.hugging_face.models import (
    floating_dtype,
    holds_adapters,
    parse_size,
    write_pretrained,
)
from lightning_automodel.checkpointing.hugging_face.own_code import classes_of
from lightning_automodel.checkpointing.hugging_face.save_adapters import find_prompted, save_prompts
from lightning_automodel.checkpointing.hugging_face.save_pretrained import check_writable, write_sharded
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import as_stored
from lightning_automodel.modules.adapted_bases import names_left_out_of
from lightning_automodel.modules.wrappers import merged_layers, without_wrappers


class HuggingFaceExport(L.Callback):
    """At the end of training, writes a directory that ``from_pretrained`` of plain transformers loads.

    It holds safetensors, config, generation config and, if the data module has one, the tokenizer. The weights are
    those at the end of training, gathered on rank 0 shard by shard. ``lightning-automodel export`` does the same with a
    checkpoint.

    Args:
        dirpath: the directory; made if it does not exist, files of the same names are overwritten.
        dtype: of the weights in the files, for example "bfloat16"; ``None``: that of the model.
        max_shard_size: of a file, and what rank 0 holds at most (unless one block is larger).
        merge: write a model with adapters as a whole, with these added to the layers; else what peft's
            ``PeftModel.from_pretrained`` reads. A prompt cannot be merged.

    Raises:
        ValueError: if ``dtype`` or ``max_shard_size`` is not one.
    """

    def __init__(
        self, dirpath: str, dtype: str | None = None, max_shard_size: str = "2GB", merge: bool = False
    ) -> None:
        self.merge = merge
        self.dirpath = Path(dirpath)
        self.dtype = None if dtype is None else floating_dtype(dtype)
        self.max_shard_size = parse_size(max_shard_size)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a file in the place of the directory before time is spent on training."""
        if self.dirpath.is_file():
            raise ValueError(f"HuggingFaceExport(dirpath={str(self.dirpath)!r}) is a file; give a directory")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses a model that could not be written, before time is spent on training."""
        model = _model_of(pl_module)
        if (prompted := find_prompted(pl_module)) is not None:
            self._check_prompts(prompted)
            return
        writes_whole = self.merge or not getattr(model, "peft_config", None)
        if writes_whole and holds_adapters(self.dirpath):
            raise ValueError(
                f"HuggingFaceExport(dirpath={str(self.dirpath)!r}) holds an adapter (adapter_config.json), which "
                "from_pretrained would read instead of the model; give another directory, or remove it"
            )
        found = descriptions_of({DESCRIPTIONS: describe_models(pl_module)})
        for description in found:
            check_exportable(description)
        if not getattr(model, "peft_config", None):
            check_writable(model)
            return
        if self.merge:
            check_mergeable(model)
        twin = with_adapters(_of(model, pl_module, found), classes_of(model))
        if self.merge:
            check_merges(twin)

    def _check_prompts(self, prompted: Any) -> None:
        if self.merge:
            kind = type(next(iter(prompted.peft_config.values()))).__name__
            raise ValueError(
                f"HuggingFaceExport(merge=True): what {kind} learns stands before the model and not in its layers, so "
                "it cannot be added to them; leave merge out: PeftModel.from_pretrained reads the prompt"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the model on rank 0. Collective."""
        model = _model_of(pl_module)
        if (prompted := find_prompted(pl_module)) is not None:
            save_prompts(prompted, self.dirpath)
        elif getattr(model, "peft_config", None):
            write_adapted(pl_module, model, self.dirpath, self.dtype, self.max_shard_size, merge=self.merge)
        else:
            write_sharded(model, self.dirpath, dtype=self.dtype, max_shard_size=self.max_shard_size)
        tokenizer = getattr(getattr(trainer, "datamodule", None), "loaded_tokenizer", None)
        if trainer.is_global_zero and tokenizer is not None:
            tokenizer.save_pretrained(self.dirpath)
        trainer.strategy.barrier("HuggingFaceExport")


def write_adapted(
    module: L.LightningModule,
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    *,
    merge: bool,
) -> None:
    """Writes the adapters of a model whose parameters lie on several ranks, alone or merged: all ranks call."""
    if merge and (already := merged_layers(model)):
        raise ValueError(
            f"HuggingFaceExport(merge=True): the adapters of {already[0]} are merged into its weights already, and "
            "would be added twice; call unmerge_adapter() of the PeftModel at the end of what needs them merged"
        )
    state = model.state_dict(keep_vars=True)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    found = descriptions_of({DESCRIPTIONS: describe_models(module)})  # beside it a teacher, a reward model
    description = _of(model, module, found)
    twin = with_adapters(description, classes_of(model))
    if not merge:
        if is_writer:
            as_in_files = names_left_out_of(model, module)
            warn_of_what_stays_behind(twin, description, set(state) - as_in_files)
        write_adapters(twin, description, lambda name: _whole(state[name]), directory if is_writer else None)
        return
    if is_writer:
        warn_of_what_is_not_merged(description)
    fetch = merged(twin, lambda name: _whole(state[name]))
    with without_wrappers(twin):
        write_pretrained(twin, fetch, directory if is_writer else None, dtype=dtype, max_shard_size=max_shard_size)


def _of(model: PreTrainedModel, module: L.LightningModule, found: Iterable[Description]) -> Description:
    return next(each for each in found if module.get_submodule(each.name) is model)


def _whole(tensor: Tensor) -> Tensor | None:
    return gather_on_rank_zero(as_stored(tensor)) if dist.is_initialized() else tensor.detach().cpu()


def _outermost_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _model_of(module: L.LightningModule) -> PreTrainedModel:
    models = [model for child in module.children() for model in _outermost_models(child)]
    if len(models) > 1:  # beside a teacher, or a reference
        models = [model for model in models if any(p.requires_grad for p in model.parameters())]
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(models)} Hugging Face models that train; HuggingFaceExport writes "
            "exactly one. Write yours with model.save_pretrained(directory), on every rank, instead"
        )
    return models[0]
