"""Methods of peft beside LoRA: right where layers stay whole, an error that says what to use where they do not."""

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from torch import nn

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import BOUND, Adapted, error, lora
from tests.support.families import tiny_model
from tests.support.layouts import LAYOUTS
from tests.support.training import batches, make_trainer, tiny_llama, whole

PROMPT = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
CONFIGS = {
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj", "o_proj"], init_weights=False),
    "oft": peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "o_proj"]),
    "tokens": peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "tokens of the head": peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [7]}
    ),
    "lokr": peft.LoKrConfig(r=3, target_modules=["q_proj", "down_proj"], init_weights=False),
    "adalora": peft.AdaLoraConfig(init_r=4, tinit=1, tfinal=1, total_step=6, target_modules=["q_proj", "o_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prefix": peft.PrefixTuningConfig(**PROMPT),
    "prompt": peft.PromptTuningConfig(**PROMPT),
    "encoder": peft.PromptEncoderConfig(**PROMPT),
    "adaption": peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"),
    "cartridge": peft.CartridgeConfig(**PROMPT),
    "shadow": peft.ShadowConfig(r=4, shadow_dropout=0.0, task_type="CAUSAL_LM"),
    "tinylora": peft.TinyLoraConfig(u=8, target_modules=["q_proj"]),
    "unilora": peft.UniLoraConfig(r=4, theta_d_length=32, target_modules=["q_proj"]),
    "vblora": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"]),
    "cpt": peft.CPTConfig(cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 4], task_type="CAUSAL_LM"),
}
PROMPTS = {"prompt", "encoder", "adaption"}
WHOLE = {
    "vera",
    "loha",
    "oft",
    "tokens",
    "tokens of the head",
    "lokr",
    "adalora",
    "norms",
    "prefix",
    "cartridge",
    *PROMPTS,
}
_SOME: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"]}
MORE = {
    "beft": peft.BeftConfig(**_SOME),
    "deft": peft.DeftConfig(r=4, **_SOME),
    "frod": peft.FrodConfig(progressbar=False, sparse_rate=0.1, **_SOME),
    "glora": peft.GloraConfig(r=4, **_SOME),
    "hira": peft.HiraConfig(r=4, **_SOME),
    "peanut": peft.PeanutConfig(r=4, **_SOME),
    "psoft": peft.PsoftConfig(r=4, **_SOME),
    "supertuning": peft.SupertuningConfig(**_SOME),
    "tokens alone": peft.TrainableTokensConfig(token_indices=[3, 5]),
    "boft": peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, **_SOME),
    "c3a": peft.C3AConfig(block_size=8, **_SOME),
    "delora": peft.DeloraConfig(r=2, **_SOME),
    "dora of a table": peft.LoraConfig(r=4, use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "fourier": peft.FourierFTConfig(n_frequency=10, **_SOME),
    "gralora": peft.GraloraConfig(r=4, gralora_k=2, **_SOME),
    "hra": peft.HRAConfig(r=2, **_SOME),
    "miss": peft.MissConfig(r=4, **_SOME),
    "randlora": peft.RandLoraConfig(r=4, **_SOME),
    "road": peft.RoadConfig(group_size=8, **_SOME),
    "shira": peft.ShiraConfig(r=2, random_seed=3, **_SOME),
    "waveft": peft.WaveFTConfig(n_frequency=10, **_SOME),
}
"""Of which nothing is known here: layers that stay whole compute them as peft does."""
RIGHT = {"fsdp2-dp2": WHOLE, "fsdp2-tp2": {"norms", *PROMPTS}}


def adapt(method: str, base: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return peft.get_peft_model(base, (CONFIGS | MORE)[method])  # type: ignore[arg-type]


def outcomes(layout: str, directory: Path, methods: Iterable[str] = tuple(CONFIGS)) -> dict[str, float | str]:
    """Runs on each rank: the largest error of each method, or the message that refuses it."""
    found: dict[str, float | str] = {}
    for method in methods:
        try:
            found[method] = error(layout, partial(adapt, method), directory)[0]
        except ValueError as refusal:
            found[method] = str(refusal)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", RIGHT)
def test_right_or_refused(layout: str, tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for found in pool2.run(outcomes, layout, tmp_path, trainer=True):
        for method, outcome in found.items():
            if isinstance(outcome, str):
                assert method not in RIGHT[layout], (method, outcome)
                assert "use LoRA" in outcome, (method, outcome)
            else:
                assert method in RIGHT[layout]
                assert outcome <= BOUND, (method, outcome)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2-dp2", "ddp-2", "megatron3-dp2"])
def test_methods_of_which_nothing_is_known_are_right_on_whole_layers(layout: str, tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for found in pool2.run(outcomes, layout, tmp_path, tuple(MORE), trainer=True, timeout=300):
        assert {method: error for method, error in found.items() if isinstance(error, str) or error > BOUND} == {}


def dora(base: nn.Module) -> nn.Module:
    return lora(base, use_dora=True)


def refusals(directory: Path) -> list[str]:
    """Runs on each rank: what ends in an error of a library, if nobody says so before."""
    found = []
    both = FSDP2Config(enable_compile=True, compile_backend="aot_eager", activation_checkpointing=True)
    for layout, change, config in (("megatron3-dp2", partial(adapt, "tokens"), {}), ("fsdp2-dp2", dora, both)):
        try:
            error(layout, change, directory, config=config)
        except ValueError as refusal:
            found.append(str(refusal))
    return found


def test_what_a_library_cannot_do_is_a_sentence(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for tokens, compiled in pool2.run(refusals, tmp_path, trainer=True):
        assert "trainable_token_indices of peft (model.base_model.model.model.embed_tokens)" in tokens
        assert "use FSDP2TPStrategy with tp=1, DDPStrategy, or modules_to_save" in tokens
        assert "torch cannot trace DoRA of peft where blocks are both compiled and recomputed" in compiled
        assert "use enable_compile=False or activation_checkpointing=False" in compiled


class WithFrozenFactors(Adapted):
    """Trains by peft's optimizer for LoRA-FA."""

    def configure_optimizers(self) -> Any:
        return create_lorafa_optimizer(self.model, r=3, lora_alpha=8, lr=0.1)


def refused_optimizers(directory: Path) -> list[str]:
    """Runs on each rank."""
    found = []
    for layout in ("fsdp2-tp2", "fsdp2-dp2"):
        chosen = LAYOUTS[layout]
        with pytest.raises(ValueError, match="LoraFAOptimizer") as refusal:
            make_trainer(chosen.make(), max_steps=1).fit(WithFrozenFactors(directory, lora), batches(chosen.data_size))
        found.append(str(refusal.value))
    return found


def test_an_optimizer_that_adds_plain_tensors_to_shards_is_named(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for said in pool2.run(refused_optimizers, tmp_path, trainer=True):
        assert [message[:69] for message in said] == 2 * [
            "LoraFAOptimizer computes with plain tensors of its own beside sharded"
        ]
        assert all("use DDPStrategy" in message and "outside of the forward pass" not in message for message in said)


def error_of_a_variant_that_looks_at_places() -> float:
    """Runs on each rank: of gradients of activated LoRA, which adapts the tokens behind an invocation, under cp."""
    ids = torch.randint(3, 90, (2, 15), generator=torch.Generator().manual_seed(0))
    ids[:, 6:8] = torch.tensor([91, 92])
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    config.alora_invocation_tokens = [91, 92]
    reference: Any = peft.get_peft_model(tiny_model("llama"), config)
    model = copy.deepcopy(reference)
    parallelize(model.get_base_model(), build_mesh(resolve_sizes(2, cp=2), "cpu"))
    gradients = []
    for one in (reference, model):
        one.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: whole(p.grad) for name, p in one.named_parameters() if p.requires_grad})
    return max(float((gradients[1][n] - g).norm() / g.norm()) for n, g in gradients[0].items())


def test_a_variant_of_lora_that_looks_at_places_sees_the_whole_sequence(pool2: Pool) -> None:
    assert max(pool2.run(error_of_a_variant_that_looks_at_places)) < 5e-5
