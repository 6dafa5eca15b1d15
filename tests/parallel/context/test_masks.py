"""Masks are built by rows: a rank never has the whole one, [seq, seq]."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import whole

LENGTH = 37
IDS = torch.randint(3, 100, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PACKED = {"position_ids": torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])[None].expand(2, -1)}
PADDED = {"attention_mask": torch.ones(2, LENGTH, dtype=torch.int64).index_fill_(1, torch.tensor([0, 1]), 0)}


class Largest(TorchDispatchMode):
    """Notes the most rows that a tensor [batch, 1, rows, LENGTH] has in memory."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim == 4 and out.shape[1] == 1 and out.shape[-1] == LENGTH:
            self.rows = max(self.rows, out.shape[-2] if out.stride(-2) else 1)
        return out


def rows_of_masks(family: str, beside: dict[str, Tensor], implementation: str, exchange: str) -> int:
    """Runs on each rank."""
    world = torch.distributed.get_world_size()
    model = tiny_model(family, attn_implementation=implementation)
    model = parallelize(model, build_mesh(resolve_sizes(world, cp=world), "cpu"), FSDP2Config(cp_exchange=exchange))
    with Largest() as largest:
        model.train()(input_ids=IDS, labels=IDS, **beside).loss.backward()
    return largest.rows


@pytest.mark.slow
@pytest.mark.parametrize("implementation", with_long(["sdpa", "eager"], "eager"))
def test_no_rank_has_the_whole_mask(pool2: Pool, implementation: str) -> None:
    for family, beside in (("gemma3_text", PACKED), ("llama", PADDED)):
        for exchange in ("gather", "auto"):
            rows = pool2.run(rows_of_masks, family, beside, implementation, exchange)
            assert sorted(rows) == [LENGTH // 2, LENGTH - LENGTH // 2], (family, exchange)
        assert pool2.run(rows_of_masks, family, beside, implementation, "all_to_all") == [LENGTH, LENGTH]


def test_what_sees_the_whole_sequence_gets_the_whole_mask(pool2: Pool) -> None:
    assert pool2.run(rows_of_masks, "dots3_note_text", PACKED, "sdpa", "gather") == [LENGTH, LENGTH]


def changed_masks() -> None:
    """Runs on each rank: a model of somebody's own that changes its mask in front of its blocks."""
    model = tiny_model("llama")
    world = torch.distributed.get_world_size()
    model.model.layers[0].register_forward_pre_hook(
        lambda block, args, kwargs: (args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}),
        with_kwargs=True,
    )
    model = parallelize(model, build_mesh(resolve_sizes(world, cp=world), "cpu"), FSDP2Config())
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    model.train()(input_ids=ids, labels=ids, **PADDED)


def test_masks_that_a_model_changes_are_refused(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="rows of a mask, and the model changed them before its blocks"):
        pool2.run(changed_masks)


def error_of_masks_of_users(implementation: str, dtype: torch.dtype = torch.bool) -> float:
    """Runs on each rank: the largest error of gradients with a mask that shuts the first tokens off for the others."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[8:, :3] = False
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": mask.expand(2, 1, -1, -1).to(dtype)}
    one = tiny_model("llama", implementation).train()
    world = torch.distributed.get_world_size()
    many = parallelize(copy.deepcopy(one), build_mesh(resolve_sizes(world, cp=world), "cpu"), FSDP2Config())
    for model in (one, many):
        model(**batch).loss.backward()
    expected, found = (dict(model.named_parameters()) for model in (one, many))
    return max(float((whole(found[n].grad) - p.grad).norm() / p.grad.norm()) for n, p in expected.items())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_boolean_masks_mean_what_they_mean_on_one_process(implementation: str, pool2: Pool) -> None:
    """Scaled dot products mask by them; transformers' eager attention adds 0 and 1 to its scores."""
    assert max(pool2.run(error_of_masks_of_users, implementation)) < 1e-5


def test_masks_of_whole_numbers_are_added_to_scores(pool2: Pool) -> None:
    """By transformers' eager attention; scaled dot products refuse them on one process, too."""
    assert max(pool2.run(error_of_masks_of_users, "eager", torch.int64)) < 1e-5
    with pytest.raises(RankFailed, match="Expected attn_mask dtype to be bool or float"):
        pool2.run(error_of_masks_of_users, "sdpa", torch.int64)
