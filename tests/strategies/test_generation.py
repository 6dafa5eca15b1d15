"""Steps that train on what their model generates, as those of GRPO do: completions of unlike lengths on data ranks that
share shards, against one process.
"""

from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_automodel import FSDP2TPStrategy, MegatronFSDPStrategy
from lightning_automodel.modules import structure
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.parallel.test_lone_parts import tiny_bart
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.layouts import LAYOUTS, Layout
from tests.support.marks import with_long
from tests.support.training import VOCABULARY, batches, make_trainer, tiny_llama, whole_parameters

PADDING, NEW = VOCABULARY - 1, 8
HYBRID = Layout(ranks=4, data_size=4, make=lambda **options: FSDP2TPStrategy(dp_replicate=2, dp_shard=2, **options))


def outspoken_llama() -> nn.Module:
    """Says one thing to one prompt, and another to others."""
    model = tiny_llama(tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


class Rewarded(Noted):
    """Raises what it says to some prompts, and lowers what it says to others."""

    ways: ClassVar[dict[str, Any]] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.made()
            self.lengths: list[int] = []
            self.told: list[float] = []

    def made(self) -> nn.Module:
        return outspoken_llama()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not isinstance(self.trainer.strategy, MegatronFSDPStrategy):  # losses of later steps tell
            super().on_before_optimizer_step(optimizer)

    def complete(self, model: Any, ids: Tensor) -> Tensor:
        ends = {"eos_token_id": list(range(VOCABULARY // 2)), "pad_token_id": PADDING, "max_new_tokens": NEW}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **ends, **self.ways})

    def completed(self, ids: Tensor) -> Tensor:
        found = self.complete(self.model, ids)
        self.lengths.append(found.shape[1])
        return found

    def log_probabilities(self, ids: Tensor, completed: Tensor) -> Tensor:
        return self.of_tokens(self.model(completed).logits, completed)[:, ids.shape[1] - 1 :]

    def of_tokens(self, logits: Tensor, tokens: Tensor) -> Tensor:
        found = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return found * (tokens[:, 1:] != PADDING)

    def loss(self, batch: list[Tensor]) -> Tensor:
        completed = self.completed(batch[0])
        assert self.model.training
        reward = batch[0].float().mean(1) / VOCABULARY - 0.5
        return -0.1 * (reward * self.log_probabilities(batch[0], completed).sum(1)).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        said = (self.completed(batch[0]) != PADDING).sum(1)
        self.log("said", said.float().mean(), sync_dist=True, batch_size=len(said))

    def on_validation_epoch_end(self) -> None:
        self.told.append(float(self.trainer.callback_metrics.get("said", 0)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


class Beams(Rewarded):
    ways: ClassVar[dict[str, Any]] = {"num_beams": 3}


class Uncached(Rewarded):
    ways: ClassVar[dict[str, Any]] = {"use_cache": False}


class Guided(Rewarded):
    """Two passes for each token."""

    ways: ClassVar[dict[str, Any]] = {"guidance_scale": 1.5}


class ByUnits(Rewarded):
    """With units of their own for embedding and head."""

    def configure_model(self) -> None:
        structure.LARGE = 0
        super().configure_model()


class Adapted(Rewarded):
    def made(self) -> nn.Module:
        torch.manual_seed(0)
        options: Any = {"target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.0}
        return get_peft_model(outspoken_llama(), LoraConfig(r=2, **options))


class Translated(Rewarded):
    """By an encoder and a decoder, which have no tensor-parallel plan."""

    def made(self) -> nn.Module:
        return tiny_bart()

    def log_probabilities(self, ids: Tensor, completed: Tensor) -> Tensor:
        return self.of_tokens(self.model(ids, decoder_input_ids=completed).logits, completed)


class TranslatedByBeams(Translated):
    ways: ClassVar[dict[str, Any]] = {"num_beams": 3}


class Sampled(Rewarded):
    """Draws other numbers on each data rank, by which a whole copy says the same; and so do the draws behind them."""

    ways: ClassVar[dict[str, Any]] = {"do_sample": True}

    def completed(self, ids: Tensor) -> Tensor:
        whole, found = outspoken_llama(), []
        whole.load_state_dict(whole_parameters(self.model))
        for model in (whole, self.model):
            torch.manual_seed(1000 * self.global_step + self.trainer.strategy.data_rank)  # type: ignore[attr-defined]
            found.append((self.complete(model, ids), torch.rand(3)))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
        self.lengths.append(found[1][0].shape[1])
        return found[1][0]


def fitted(kind: type[Rewarded], name: str | None) -> dict[str, Any]:
    layout, module = {**LAYOUTS, "hybrid": HYBRID}.get(name or ""), kind()
    strategy, size = (layout.make(), layout.data_size) if layout else ("auto", 1)
    trainer = make_trainer(strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, batches(size), batches(size, 14))
    return {key: vars(module)[key] for key in ("losses", "gradients", "told", "lengths")}


KINDS = (Rewarded, Beams, Uncached, Guided, ByUnits, Adapted, Translated, TranslatedByBeams, Sampled)
BY_FEW = ("fsdp2-dp2", "hybrid", "fsdp2-dp2-tp2", "megatron3-dp2", "megatron3-dp2-tp2", "megatron2-dp2", "ddp-2")
WITHOUT_PLAN = (Translated,)
READING_WHOLE = (Sampled,)
"""Kinds that read whole parameters, which Megatron-FSDP does not gather."""
ALL = [
    (kind, layout)
    for kind in KINDS
    for layout in BY_FEW
    if not (issubclass(kind, WITHOUT_PLAN) and "tp2" in layout)
    and not (issubclass(kind, READING_WHOLE) and "megatron" in layout)
]
FAST = [(Adapted, "fsdp2-dp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(ALL, *(case for case in ALL if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Rewarded], layout: str, nursery: Nursery) -> None:
    ranks = (HYBRID if layout == "hybrid" else LAYOUTS[layout]).ranks
    many = Pool(nursery, ranks).run(fitted, kind, layout, trainer=True)
    assert len({tuple(rank["lengths"]) for rank in many}) > 1
    if kind is Sampled:
        return
    one = Pool(nursery, 1).run(fitted, kind, None, trainer=True)[0]
    for rank in many:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert rank["told"] == pytest.approx(one["told"])
        for expected, found in zip(one["gradients"], rank["gradients"], strict="megatron" not in layout):
            check_gradients(expected, found)


class Judged(Rewarded):
    """Asks another sharded model for a word, from within its own completion."""

    def configure_model(self) -> None:
        super().configure_model()
        self.judge = tiny_llama()

    def complete(self, model: nn.Module, ids: Tensor) -> Tensor:
        def judged(seen: Tensor, scores: Tensor) -> Tensor:
            self.judge.generate(seen, max_new_tokens=1)
            return scores

        return model.generate(ids, max_new_tokens=2, logits_processor=[judged], pad_token_id=PADDING)


def test_a_model_that_generates_within_another_is_refused(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"LlamaForCausalLM generates within generate of LlamaForCausalLM.*one model"):
        pool2.run(fitted, Judged, "fsdp2-dp2", trainer=True)
