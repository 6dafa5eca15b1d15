"""How uneven the ranks' work is: a number in the log, and a sentence where memory ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.config import FSDP2Config
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.metrics import expert_loads
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.parallel.experts.test_checkpoints import tiny_experts
from tests.parallel.experts.test_composition import gather_all
from tests.parallel.experts.test_field_bugs import starved
from tests.support.training import Memory, make_trainer, world_size


def _parallel(model: nn.Module, ep: int, dispatcher: str | None = None) -> nn.Module:
    mesh = build_mesh(resolve_sizes(world_size(), ep=ep), "cpu")
    return parallelize(model, mesh, FSDP2Config(expert_dispatcher=dispatcher))


def _tokens() -> torch.Tensor:
    return torch.arange(3, 27).view(2, 12)


def loads() -> list[dict[str, float]]:
    """Runs on each rank: of a router that knows one rank only, of a free one, when nothing was computed since, and
    of the first as another dispatcher brings its tokens.
    """
    found = []
    for model in (starved("eager"), tiny_experts()):
        parallel = _parallel(model, ep=4)
        parallel(input_ids=_tokens())
        found.append(expert_loads(parallel))
    nothing = expert_loads(parallel)
    parallel = _parallel(starved("eager"), 4, f"{gather_all.__module__}.gather_all")
    parallel(input_ids=_tokens())
    return [*found, nothing, expert_loads(parallel)]


def test_the_busiest_rank_over_the_mean(pool4: Pool) -> None:
    one_rank, free, nothing, other_dispatcher = pool4.run(loads)[0]
    assert one_rank == other_dispatcher == {"model.layers.1.mlp.experts": 4.0}
    assert free.keys() == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert all(1 <= ratio < 4 for ratio in free.values())
    assert set(nothing.values()) == {1.0}


class Full(nn.Module):
    """No memory is left where experts compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def without_memory() -> None:
    model = _parallel(tiny_experts(), ep=2)
    model.get_submodule("model.layers.1.mlp.experts").act_fn = Full()
    model(input_ids=_tokens())


def test_where_memory_ends(pool2: Pool) -> None:
    with pytest.raises(
        RankFailed, match=r"experts: tokens of other ranks came to this one: .* rows, .* or a smaller ep"
    ):
        pool2.run(without_memory)


def logged(directory: Path) -> list[dict[str, Any]]:
    """Runs on each rank: what a run from files logs."""
    memory = Memory()
    trainer = make_trainer(FSDP2TPStrategy(ep=2), max_steps=2, logger=memory, log_every_n_steps=1)
    ids = _tokens()[torch.distributed.get_rank() if torch.distributed.is_initialized() else 0].unsqueeze(0)
    batches = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}] * 8
    trainer.fit(CausalLM(str(directory)), torch.utils.data.DataLoader(batches, batch_size=None))
    return memory.logged


@pytest.mark.slow
def test_a_run_logs_it(pool2: Pool, tmp_path: Path) -> None:
    tiny_experts().save_pretrained(tmp_path)
    loads = [row["train/expert_load"] for row in pool2.run(logged, tmp_path, trainer=True)[0] if "train/loss" in row]
    assert len(loads) == 2
    assert all(1 <= load <= 2 for load in loads)
