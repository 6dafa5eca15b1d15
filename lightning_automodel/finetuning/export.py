"""Writes the trained model in Hugging Face's format when training ends."""

from pathlib import Path

import lightning as L
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lightning_automodel.checkpointing.hugging_face import floating_dtype, parse_size, write_pretrained
from lightning_automodel.fragments import as_stored
from lightning_automodel.shards import gather_whole


class HuggingFaceExport(L.Callback):
    """At the end of training, writes a directory that ``from_pretrained`` of plain transformers loads.

    It holds safetensors, config, generation config and, if the data module has one, the tokenizer. The weights are
    those at the end of training, gathered on rank 0 shard by shard. ``lightning-automodel export`` does the same with a
    checkpoint.

    Args:
        dirpath: the directory; made if it does not exist, files of the same names are overwritten.
        dtype: of the weights in the files, for example "bfloat16"; ``None``: that of the model.
        max_shard_size: of a file, and what rank 0 holds at most (unless one block is larger).

    Raises:
        ValueError: if ``dtype`` or ``max_shard_size`` is not one.
    """

    def __init__(self, dirpath: str, dtype: str | None = None, max_shard_size: str = "2GB") -> None:
        self.dirpath = Path(dirpath)
        self.dtype = None if dtype is None else floating_dtype(dtype)
        self.max_shard_size = parse_size(max_shard_size)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a file in the place of the directory before time is spent on training."""
        if self.dirpath.is_file():
            raise ValueError(f"HuggingFaceExport(dirpath={str(self.dirpath)!r}) is a file; give a directory")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank takes part; rank 0 writes, and the others wait."""
        model = _model_of(pl_module)
        state = model.state_dict(keep_vars=True)
        directory = self.dirpath if trainer.is_global_zero else None
        write_pretrained(model, lambda name: _whole(state[name]), directory, self.dtype, self.max_shard_size)
        tokenizer = getattr(getattr(trainer, "datamodule", None), "loaded_tokenizer", None)
        if trainer.is_global_zero and tokenizer is not None:
            tokenizer.save_pretrained(self.dirpath)
        trainer.strategy.barrier("HuggingFaceExport")


def _whole(tensor: Tensor) -> Tensor | None:
    return gather_whole(as_stored(tensor)) if dist.is_initialized() else tensor.detach().cpu()


def _model_of(module: L.LightningModule) -> PreTrainedModel:
    models = [child for child in module.children() if isinstance(child, PreTrainedModel)]
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(models)} Hugging Face models as attributes; HuggingFaceExport writes "
            "exactly one. Write yours with model.save_pretrained(directory, state_dict=...) instead"
        )
    return models[0]
