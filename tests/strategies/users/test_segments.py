"""Texts that are read in segments, each of which goes on from the cache of those before: gradients come back through
keys and values, into passes whose outputs no loss reads (compressed context, recurrent memory).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, PreTrainedModel

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.changes import changed
from tests.support.layouts import LAYOUTS
from tests.support.training import HIDDEN, VOCABULARY, Descending, tiny_llama

SEGMENTS = 3


class LastOfSegments(Descending):
    """The loss of the last segment alone."""

    every = False
    make: Callable[[], PreTrainedModel] = staticmethod(tiny_llama)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        losses = []
        for ids in batch[0].chunk(SEGMENTS, dim=1):
            losses.append(self.model(input_ids=ids, labels=ids, past_key_values=cache).loss)
        return sum(losses) if self.every else losses[-1]  # type: ignore[return-value]


class EverySegment(LastOfSegments):
    """The losses of all segments."""

    every = True


class DefaultCache(LastOfSegments):
    """Goes on with what the first pass returns."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch[0].chunk(2, dim=1)
        cache = self.model(input_ids=first).past_key_values
        return self.model(input_ids=second, labels=second, past_key_values=cache).loss


def tiny_bart() -> BartForConditionalGeneration:
    """The same weights in every process; a norm stands before the blocks of its decoder."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": HIDDEN, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = BartConfig(**sizes, **widths, vocab_size=VOCABULARY, max_position_embeddings=32, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BartForConditionalGeneration(config)


class AnswersInTurns(LastOfSegments):
    """Reads a text once, and writes an answer to it in turns: the keys and values of the text stay."""

    make = staticmethod(tiny_bart)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        read, cache = self.model.get_encoder()(input_ids=batch[0]), None
        for ids in batch[0].chunk(SEGMENTS, dim=1):
            outputs = self.model(encoder_outputs=read, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
        return functional.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten())


def fitted(kind: type[LastOfSegments], layout: str, levers: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank."""
    return changed(kind(), kind.make(), layout, levers)


COMPILED = {"enable_compile": True, "compile_backend": "aot_eager"}
CASES: list[tuple[type[LastOfSegments], str, dict[str, Any]]] = [
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
    (AnswersInTurns, "fsdp2-dp2", {}),
    (AnswersInTurns, "megatron3-dp2", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "levers"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_steps_are_those_of_one_process(
    kind: type[LastOfSegments], layout: str, levers: dict[str, Any], nursery: Nursery
) -> None:
    (one,) = Pool(nursery, 1).run(fitted, kind, "ddp-1", {}, trainer=True)
    many = Pool(nursery, LAYOUTS[layout].ranks).run(fitted, kind, layout, levers, trainer=True, timeout=100)[0]
    assert one.keys() == many.keys()
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm() + 1e-12, name  # biases of keys change nothing
