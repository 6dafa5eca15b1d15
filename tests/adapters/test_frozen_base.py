"""A frozen base under DDP and Megatron-FSDP: in no reduction, no memory of gradients, and without optimizer states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.parallel.megatron_fsdp.passes import Passes
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import Adapted, lora
from tests.parallel.levers.collectives import Collectives
from tests.support.layouts import LAYOUTS
from tests.support.training import batches, make_trainer, tiny_llama

FEW = 256
"""Bytes of what ranks ask each other in a step."""


class Counted(Adapted):
    """Counts the collectives of a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def on_train_batch_start(self, *args: Any) -> None:
        self.collectives = Collectives({})
        self.collectives.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.collectives.__exit__(None, None, None)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)


def counted(layout: str, directory: Path) -> dict[str, Any]:
    """Runs on each rank: numbers in reductions, in states, and trained; and frozen parameters with a gradient."""
    chosen, module = LAYOUTS[layout], Counted(directory, lora, keeps_gradients=False)
    trainer = make_trainer(chosen.make(), max_steps=1)
    trainer.fit(module, batches(chosen.data_size))
    found, (optimizer,) = module.collectives.found["bytes"], trainer.optimizers
    sharded = [value.sharded for value in vars(module).values() if isinstance(value, Passes)]
    groups = [group for each in sharded for group in each.wrapper.param_and_grad_buffer.parameter_groups]
    held = [p for group in groups if group.main_grad_buffer is not None for p in group.params]
    return {
        "reduced": sum(count for kind, count in found.items() if "reduce" in kind) // 4,
        "states": sum(local_tensor(x).numel() for state in optimizer.state.values() for x in state.values() if x.ndim),
        "trained": sum(p.numel() for name, p in module.named_parameters() if "lora_" in name),
        "held": None if not groups else sum(p.numel() for p in held),
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad and p.grad is not None],
    }


def both(directory: Path) -> dict[str, dict[str, Any]]:
    """Runs on each rank."""
    return {layout: counted(layout, directory) for layout in ("ddp-2", "megatron3-dp2")}


@pytest.mark.slow
def test_the_frozen_base_is_in_no_gradient(tmp_path: Path, pool2: Pool) -> None:
    model = tiny_llama(tied=False)
    model.save_pretrained(tmp_path)
    ranks = pool2.run(both, tmp_path, trainer=True)
    for layout, copies, padded in (("ddp-2", 2, 1.0), ("megatron3-dp2", 1, 1.25)):
        for numbers in (found[layout] for found in ranks):
            trained = numbers["trained"]
            assert 0 < trained < sum(p.numel() for p in model.parameters()) / 4
            assert trained <= numbers["reduced"] <= padded * trained + FEW // 4, (layout, numbers)
            assert numbers["held"] == (None if layout.startswith("ddp") else trained)
            assert numbers["frozen"] == []
        states = sum(found[layout]["states"] for found in ranks)
        assert states == copies * 2 * trained, (layout, states)
