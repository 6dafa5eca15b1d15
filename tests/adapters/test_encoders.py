"""Adapters on encoders, whose tensor-parallel plan is told by the names of their layers, train as on one process."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertForTokenClassification

from lightning_automodel.plans.selection import known_rules
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import ARGUMENTS, BOUND, Adapted, largest, train_alone
from tests.support.training import HIDDEN, batches, make_trainer

CLASSES = 3
TARGETS = ["query", "value", "dense"]


class Tagging(Adapted):
    """Tells the class of each token."""

    def configure_model(self) -> None:
        if self.model is None:
            base = BertForTokenClassification.from_pretrained(self.directory, dtype=torch.get_default_dtype())
            torch.manual_seed(5)
            self.model = self.adapt(base).train()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0] % CLASSES).loss


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False))


def loaded(adapter: Path, model: Any) -> Any:
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def error(directory: Path, adapter: Path) -> tuple[tuple[float, str], set[str]]:
    """Runs on each rank: the largest error, and which layers are split."""
    expected = train_alone(Tagging(directory, partial(loaded, adapter)))
    module = Tagging(directory, partial(loaded, adapter))
    make_trainer({"tp": 2}, **ARGUMENTS).fit(module, batches(1, 32))
    layers = module.model.base_model.model.bert.encoder.layer[0].named_parameters()
    split = {name for name, p in layers if any(x.is_shard() for x in getattr(p, "placements", ()))}
    return largest(module, expected), {name for name in split if name.endswith("base_layer.weight")}


def test_rules_are_known_whatever_adapters_stand_around_the_layers() -> None:
    with torch.device("meta"):
        plain, adapted = (BertForTokenClassification(BertConfig(num_hidden_layers=2)) for _ in range(2))
        assert known_rules(lora(adapted).base_model.model) == known_rules(plain) != {}


def test_layers_of_a_classifier_of_tokens(tmp_path: Path, pool2: Pool) -> None:
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(num_hidden_layers=2, num_labels=CLASSES, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    BertForTokenClassification(config).save_pretrained(tmp_path / "base")
    lora(BertForTokenClassification(config)).save_pretrained(tmp_path / "adapter")
    for found, split in pool2.run(error, tmp_path / "base", tmp_path / "adapter", trainer=True):
        assert found[0] <= BOUND, found
        assert {name.split(".")[-3] for name in split} == set(TARGETS)
