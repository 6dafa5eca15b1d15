"""What is counted per token and per pair of tokens is what torch's counter finds in a real step."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner import Run, plan
from lightning_automodel.planner.estimate import model_flops
from lightning_automodel.planner.flops import ModelFlops, count_model, find_model, whole_twin, windows_of
from lightning_automodel.planner.plan import build
from tests.support.families import tiny_config, tiny_model
from tests.support.marks import with_long

FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "qwen3", "gpt2", "mixtral", "gpt_oss", "qwen3_moe", "olmo2", "phi3")
LENGTH = 48
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]


def model_of(family: str, **changes: Any) -> nn.Module:
    return tiny_model(family, experts="batched_mm", **changes).train()


def really(model: nn.Module, length: int = LENGTH) -> int:
    ids = torch.randint(100, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


def without_windows(flops: ModelFlops, length: int = LENGTH) -> float:
    """As torch counts: masks do not make a product smaller."""
    return flops.of(length, dict.fromkeys(flops.per_pair, length**2))


@pytest.mark.parametrize("family", with_long(FAMILIES, *FAMILIES[2:]))
def test_counts_are_those_of_a_real_step(family: str) -> None:
    model = model_of(family)
    assert without_windows(count_model(whole_twin(model))) == really(model)


def test_the_closed_form_of_dense_models() -> None:
    """PaLM, appendix B: 6 N + 12 L H Q T per token; N without the embedding, which multiplies nothing."""
    model = model_of("llama", num_hidden_layers=7)
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert count_model(whole_twin(model)).of_documents([LENGTH]) == 6 * weights * LENGTH + attention * LENGTH**2


def test_layers_with_windows_and_documents() -> None:
    model = model_of("gemma3_text", num_hidden_layers=4, layer_types=KINDS, sliding_window=16)
    flops = count_model(whole_twin(model))
    assert windows_of(model) == [None, 16]
    assert flops.per_pair[16] == 3 * flops.per_pair[None]
    assert without_windows(flops) == really(model)
    packed = flops.of_documents([8, 40])
    pairs = {None: 8**2 + 40**2, 16: 8**2 + 40 * 16}
    assert packed == flops.of(48, pairs) < flops.of_documents([48])


@pytest.mark.parametrize("family", with_long(["mixtral", "llama"], "llama"))
def test_a_plan_counts_the_same(family: str) -> None:
    """Experts run as grouped products there, for which torch has no formula."""
    config = tiny_config(family, num_hidden_layers=2, sliding_window=None)
    run = Run(sizes=resolve_sizes(1), config=FSDP2Config(), sequence_length=64)
    assert model_flops(plan(config, run).watched) == count_model(build(config)).of_documents([64])


@pytest.mark.parametrize("targets", with_long(["all-linear", ["v_proj"]], ["v_proj"]))
def test_frozen_weights_have_no_gradients(targets: Any) -> None:
    """Nothing before the first adapter needs any gradient either."""
    base = model_of("llama", num_hidden_layers=5)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=targets))
    found = find_model(nn.ModuleDict({"model": model}))
    assert found is model
    flops = count_model(whole_twin(model))
    assert without_windows(flops) == really(model)
    whole = count_model(whole_twin(model_of("llama", num_hidden_layers=5)))
    assert 0.6 < flops.per_token / whole.per_token < 0.75


def test_state_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM are no sum"):
        count_model(whole_twin(model_of("qwen3_next")))
