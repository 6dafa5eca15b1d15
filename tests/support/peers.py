"""Trains a family under transformers' own tensor parallelism, and compares it with one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed import DistributedConfig

from tests.support.comparison import Batch, Differences, loss_of
from tests.support.files import Files, read
from tests.support.training import whole


def by_transformers(files: Files) -> Any:
    """Reads the model split over all ranks by its own plan, as transformers' users write it."""
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    dtype = torch.get_default_dtype()
    return read(files.family, files.directory, dtype=dtype, distributed_config=config, **files.options)


def compare_step(
    build: Callable[[], nn.Module], make_parallel: Callable[[], nn.Module], micro: list[Batch]
) -> Differences:
    """Runs on every rank: loss and every gradient of one step, the worst of all ranks.

    Args:
        build: makes the model on one process.
        make_parallel: makes the same model, split over the ranks.
        micro: the micro-batches of the step, which every rank sees.
    """
    reference, model = build().train(), make_parallel().train()
    expected, actual = _step(reference, micro), _step(model, micro)
    differences = Differences()
    differences.add("loss", actual.pop("loss"), expected.pop("loss"))
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    differences.add_gradients(actual, expected, norm)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, differences.worst)
    names = {name for worst in every for name in worst}
    return Differences({name: max(worst.get(name, 0.0) for worst in every) for name in names})


def _step(model: nn.Module, micro: list[Batch]) -> dict[str, Tensor]:
    """The loss and the whole gradients after all micro-batches."""
    total = torch.zeros(())
    for batch in micro:
        torch.manual_seed(0)  # some routers sample while they train
        loss = loss_of(model, batch) / len(micro)
        loss.backward()
        total = total + whole(loss)
    return {"loss": total} | {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
