"""Texts that are read in segments, each of which goes on from the cache of those before: gradients come back through
keys and values, into passes whose outputs no loss reads (compressed context, recurrent memory).
"""

from typing import Any

import pytest
from torch import Tensor
from transformers import DynamicCache

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.changes import changed
from tests.support.layouts import LAYOUTS
from tests.support.training import Descending, tiny_llama

SEGMENTS = 3


class LastOfSegments(Descending):
    """The loss of the last segment alone."""

    every = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        losses = []
        for ids in batch[0].chunk(SEGMENTS, dim=1):
            losses.append(self.model(input_ids=ids, labels=ids, past_key_values=cache).loss)
        return sum(losses) if self.every else losses[-1]  # type: ignore[return-value]


class EverySegment(LastOfSegments):
    """The losses of all segments."""

    every = True


class DefaultCache(Descending):
    """Goes on with what the first pass returns."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch[0].chunk(2, dim=1)
        cache = self.model(input_ids=first).past_key_values
        return self.model(input_ids=second, labels=second, past_key_values=cache).loss


def fitted(kind: type[Descending], layout: str, levers: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank."""
    return changed(kind(), tiny_llama(), layout, levers)


COMPILED = {"enable_compile": True, "compile_backend": "aot_eager"}
CASES: list[tuple[type[Descending], str, dict[str, Any]]] = [
    (LastOfSegments, "fsdp2-dp2", {}),
    (LastOfSegments, "fsdp2-dp2", COMPILED),
    (LastOfSegments, "fsdp2-dp2-tp2", {}),
    (LastOfSegments, "megatron3-dp2", {}),
    (EverySegment, "fsdp2-dp2", {}),
    (EverySegment, "fsdp2-tp2", COMPILED),
    (EverySegment, "megatron3-dp2", {}),
    (DefaultCache, "fsdp2-dp2", {}),
    (DefaultCache, "megatron3-dp2", {}),
    (DefaultCache, "ddp-2", {}),
]


@pytest.mark.parametrize(("kind", "layout", "levers"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_steps_are_those_of_one_process(
    kind: type[Descending], layout: str, levers: dict[str, Any], nursery: Nursery
) -> None:
    (one,) = Pool(nursery, 1).run(fitted, kind, "ddp-1", {}, trainer=True)
    many = Pool(nursery, LAYOUTS[layout].ranks).run(fitted, kind, layout, levers, trainer=True, timeout=100)[0]
    assert one.keys() == many.keys()
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm(), name
