"""AdaLoRA reads factors beside the forward pass: the penalty, the ranks that it leaves, and exports are exact."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import ARGUMENTS, BOUND, Adapted, error, largest, train_alone
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import batches, make_trainer, tiny_llama

_TARGETS = ["q_proj", "o_proj", "down_proj"]


def adalora(base: nn.Module) -> Any:
    """A model that adds its penalty, which peft's plain ``PeftModel`` (no ``task_type``) does not."""
    torch.manual_seed(3)
    steps = {"tinit": 0, "deltaT": 1, "tfinal": 1, "total_step": 5}
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, orth_reg_weight=0.5, target_modules=_TARGETS, task_type="CAUSAL_LM", **steps
    )
    return peft.get_peft_model(base, config)  # type: ignore[arg-type]


class Allocating(Adapted):
    """Takes ranks from factors before each step."""

    step = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.step += 1
        self.model.base_model.update_and_allocate(self.step)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=next(iter(batches(1, 32)))[0]).logits


def of_allocation(layout: str, directory: Path) -> tuple[tuple[float, str], dict, dict, Tensor]:
    """Runs on each rank: the largest error, the ranks that are left, here and on one process, and logits behind."""
    expected = train_alone(Allocating(directory, adalora))
    chosen = LAYOUTS[layout]
    module = Allocating(directory, adalora)
    callbacks = [HuggingFaceExport(str(directory / layout))]
    make_trainer(chosen.make(), callbacks=callbacks, **ARGUMENTS).fit(module, batches(chosen.data_size, 32))
    found, ranks = largest(module, expected), [m.model.peft_config["default"].rank_pattern for m in (module, expected)]
    return found, ranks[0], ranks[1], logits(module.model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(["fsdp2-dp2", "ddp-2", "fsdp2-cp2"], "ddp-2", "fsdp2-cp2"))
def test_its_penalty_and_ranks_are_those_of_one_process(layout: str, tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    outcomes = pool2.run(of_allocation, layout, tmp_path, trainer=True)
    for found, ranks, expected, _ in outcomes:
        assert found[0] <= BOUND, found
        assert ranks == expected
        assert 0 < sum(map(sum, ranks.values())) < 4 * len(ranks)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / layout)
    assert float((logits(read) - outcomes[0][3]).norm() / outcomes[0][3].norm()) <= BOUND


def refusal(directory: Path) -> str:
    """Runs on each rank."""
    with pytest.raises(ValueError, match="AdaLoRA") as found:
        error("megatron3-dp2", adalora, directory)
    return str(found.value)


def test_rows_of_factors_are_no_whole_factors(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for said in pool2.run(refusal, tmp_path, trainer=True):
        assert "Megatron-FSDP shards model.layers.0.self_attn.q_proj.lora_A.default by rows there" in said
        assert "use FSDP2TPStrategy or DDPStrategy, or LoRA" in said
