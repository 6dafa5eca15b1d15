"""Hooks on parameters that FSDP2 has sharded run once per backward pass, and not where no rank has a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.training import rows, tiny_llama, whole

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "recomputed": {"activation_checkpointing": True},
}


class Heads(nn.Module):
    """Two heads, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_llama()
        self.heads = nn.ModuleList(nn.Linear(self.body.config.hidden_size, 3) for _ in range(2))

    def forward(self, ids: Tensor, head: int) -> Tensor:
        output = self.body(input_ids=ids, labels=ids, output_hidden_states=True)
        return output.loss + self.heads[head](output.hidden_states[-1]).square().mean()


def optimized_within(layout: str | None) -> list[Tensor]:
    """Runs on each rank, or as one process: each parameter is stepped when its gradient is there."""
    torch.manual_seed(1)
    model: Any = Heads()
    if layout is not None:
        mesh = build_mesh(resolve_sizes(2, dp_shard=2), "cpu")
        model = parallelize(model, mesh, FSDP2Config(**LAYOUTS[layout]))
    optimizers = {p: torch.optim.SGD([p], lr=0.3, momentum=0.9, weight_decay=0.1) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    kept = []
    for i in range(3):
        kept.append(model(rows(2), 0))  # a pass through which no backward pass comes
        (model(rows(2), i % 2) + model(rows(2).flip(0), i % 2)).backward()
        model(rows(2), i % 2).backward()
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.slow
def test_an_optimizer_within_the_backward_pass_of_two_passes(pool2: Pool) -> None:
    expected = optimized_within(None)
    for layout in LAYOUTS:
        for found in pool2.run(optimized_within, layout):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
