"""Prompts of peft in a loop of one's own: exact where the model around them is one unit, else named in an error."""

from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel import parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.support.training import VOCABULARY, tiny_llama, whole

PROMPT: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
CONFIGS = {
    "prefix": peft.PrefixTuningConfig(**PROMPT),
    "prompt": peft.PromptTuningConfig(**PROMPT),
    "encoder": peft.PromptEncoderConfig(**PROMPT),
    "tasks": peft.MultitaskPromptTuningConfig(**PROMPT, num_tasks=2, num_ranks=1),
    "cpt": peft.CPTConfig(
        cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4], task_type="CAUSAL_LM"
    ),
}


def prompted(method: str) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_llama(tied=False), CONFIGS[method]).train()


def rows(method: str) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    tasks = {"task_ids": torch.tensor([0, 1, 0, 1])} if method == "tasks" else {}
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **tasks}


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of two steps of gradient descent."""
    found = {}
    for step in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {step}"] = whole(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=0.5)
    return found


def error(method: str) -> float:
    """Runs on each rank: the largest of a gradient, with two data ranks."""
    expected = gradients(prompted(method), rows(method))
    model = parallelize(prompted(method), build_mesh(resolve_sizes(2, dp_shard=2), "cpu"))
    own = {name: value.chunk(2)[dist.get_rank()] for name, value in rows(method).items()}
    actual = gradients(model, own)
    assert actual.keys() == expected.keys()
    assert expected
    return max(float((actual[name] - g).norm() / g.norm().clamp(min=1e-6)) for name, g in expected.items())


def errors(methods: list[str]) -> dict[str, float]:
    """Runs on each rank."""
    return {method: error(method) for method in methods}


def test_prompts_are_exact_where_the_model_around_them_is_sharded(pool2: Pool) -> None:
    for found in pool2.run(errors, ["prefix", "prompt", "encoder", "tasks"]):
        assert max(found.values()) < 1e-5, found


def refusals(sizes: dict[str, int], methods: list[str]) -> dict[str, str]:
    """Runs on each rank."""
    found = {}
    for method in methods:
        with pytest.raises(ValueError, match="of peft") as refusal:
            parallelize(prompted(method), build_mesh(resolve_sizes(2, **sizes), "cpu"))
        found[method] = str(refusal.value)
    return found


def test_prompts_beside_a_model_that_is_split_are_named(pool2: Pool) -> None:
    for found in pool2.run(refusals, {"tp": 2}, ["prefix", "prompt", "encoder", "tasks"]):
        for method, message in found.items():
            assert message.startswith(f"{type(CONFIGS[method]).__name__} of peft with tp=2")
            assert "use LoRA, or tp=1 with dp_shard" in message


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_prompt_that_its_pass_writes_is_named(sizes: dict[str, int], pool2: Pool) -> None:
    for found in pool2.run(refusals, sizes, ["cpt"]):
        assert found["cpt"].startswith("CPTConfig of peft: its forward pass writes into the weight that it trains")
        assert "use LoRA, or DDPStrategy" in found["cpt"]
