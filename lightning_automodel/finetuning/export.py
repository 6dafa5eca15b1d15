"""Writes the trained model in Hugging Face's format when training ends."""

from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lightning_automodel.shards import gather_whole


class HuggingFaceExport(L.Callback):
    """At the end of training, writes a directory that ``from_pretrained`` of plain transformers loads.

    It holds safetensors, config, generation config and, if the data module has one, the tokenizer. The weights are
    those at the end of training, gathered from all ranks into the memory of rank 0.

    Args:
        dirpath: the directory; made if it does not exist, files of the same names are overwritten.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses a file in the place of the directory before time is spent on training."""
        if self.dirpath.is_file():
            raise ValueError(f"HuggingFaceExport(dirpath={str(self.dirpath)!r}) is a file; give a directory")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank takes part; rank 0 writes, and the others wait."""
        model = _model_of(pl_module)
        state_dict = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
        if trainer.is_global_zero:
            _save(model, state_dict, self.dirpath)
            tokenizer = getattr(getattr(trainer, "datamodule", None), "loaded_tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.dirpath)
        trainer.strategy.barrier("HuggingFaceExport")


def _whole(tensor: Tensor) -> Tensor | None:
    return gather_whole(tensor) if dist.is_initialized() else tensor.detach().cpu()


def _model_of(module: L.LightningModule) -> PreTrainedModel:
    models = [child for child in module.children() if isinstance(child, PreTrainedModel)]
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(models)} Hugging Face models as attributes; HuggingFaceExport writes "
            "exactly one. Write yours with model.save_pretrained(directory, state_dict=...) instead"
        )
    return models[0]


def _save(model: PreTrainedModel, state_dict: dict[str, Any], directory: Path) -> None:
    # Gathering gives every name a tensor of its own; a tied weight belongs into the file once.
    for name in model.all_tied_weights_keys:
        state_dict.pop(name, None)
    model.save_pretrained(directory, state_dict=state_dict)
