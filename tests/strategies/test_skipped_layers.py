"""Layers that encoders of transformers skip at random (``layerdrop``): alike on all ranks, as on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from lightning_automodel import DDPConfig, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Descending, batches, make_trainer, whole

RATE = 0.5


def tiny_wav2vec2(rate: float) -> Wav2Vec2ForCTC:
    """The same weights in every process; nothing else is drawn. Its config alone says how many layers are skipped."""
    dropouts = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
    config = Wav2Vec2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=16,
        conv_dim=[16],
        conv_kernel=[2],
        conv_stride=[1],
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction="mean",
        apply_spec_augment=False,
        layerdrop=rate,
        **dict.fromkeys(dropouts, 0.0),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Wav2Vec2ForCTC(config)


class Hearing(Descending):
    """Ids are the samples of a sound, and the first of them what is said."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_wav2vec2(self.rate)
            self.model.freeze_feature_encoder()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_values=batch[0] / 32 - 1, labels=batch[0][:, :2] % 15 + 1).loss


def heard(layout: str | None, rate: float = RATE) -> dict[str, Any]:
    """Runs on a rank: losses, and the bias of the head, which every pass reads."""
    torch.manual_seed(1)
    module = Hearing(rate)
    arguments = {"config": DDPConfig(find_unused_parameters=True)} if layout == "ddp-2" else {}
    strategy = LAYOUTS[layout].make(**arguments) if layout else FSDP2TPStrategy()
    trainer = make_trainer(strategy, max_steps=4, accumulate_grad_batches=2, max_epochs=4)
    trainer.fit(module, batches(LAYOUTS[layout].data_size if layout else 1))
    head = module.model.lm_head.bias
    return {"losses": module.losses, "head": None if layout and "megatron" in layout else whole(head)}


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2", "megatron3-dp2", "ddp-2"])
def test_skipped_layers_are_those_of_one_process(nursery: Nursery, pool2: Pool, layout: str) -> None:
    [one], [whole] = (Pool(nursery, 1).run(heard, None, rate, trainer=True) for rate in (RATE, 0.0))
    assert one["losses"] != pytest.approx(whole["losses"], rel=1e-4)
    for result in pool2.run(heard, layout, trainer=True):
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-5)
        if result["head"] is not None:
            torch.testing.assert_close(result["head"], one["head"], rtol=1e-5, atol=1e-6)
