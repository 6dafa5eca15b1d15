"""A tiny language model that drops at random wherever it can, and runs of it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PhiConfig, PhiForCausalLM

from tests.support.training import VOCABULARY, Recorder, batches, make_trainer, whole_parameters

RATE = 0.2


def tiny_phi(rate: float = RATE) -> PhiForCausalLM:
    """The same weights in every process; embeddings, the residual stream and attention are dropped."""
    config = PhiConfig(
        hidden_size=32,
        intermediate_size=64,  # a rank of tp=2 has as many features as the residual stream
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
        embd_pdrop=rate,
        resid_pdrop=rate,
        attention_dropout=rate,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return PhiForCausalLM(config)


class Dropping(Recorder):
    """A sample is picked for a log, on rank 0 only.

    Args:
        picks: draw from the generators of rank 0.
    """

    def __init__(self, picks: bool = True) -> None:
        super().__init__()
        self.picks = picks

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_phi()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.picks and dist.is_initialized() and dist.get_rank() == 0:
            torch.rand(1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(strategy: Strategy | dict[str, Any], *, seed: int = 1, data_size: int = 1, **arguments: Any) -> dict[str, Any]:
    """Trains; gives losses, the user's draws, whole parameters and this rank's own."""
    torch.manual_seed(seed)
    module, resume = arguments.pop("module", None) or Dropping(), arguments.pop("resume", None)
    trainer = make_trainer(strategy, **{"max_steps": 10, "accumulate_grad_batches": 2, **arguments})
    trainer.fit(module, batches(data_size), ckpt_path=resume)
    own = {n: _local(p).detach().clone() for n, p in module.named_parameters() if _is_whole(p)}
    return {"losses": module.losses, "draws": module.draws, "whole": whole_parameters(module), "own": own}


def saving(directory: Path, every: int) -> dict[str, Any]:
    """Arguments of the trainer: a checkpoint after so many steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=directory, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [saver]}


def _is_whole(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or all(p.is_replicate() for p in parameter.placements)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
