"""Models of transformers of which somebody changed a method or a function that the forward pass of a class calls."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans.known_code import functions_of_users, is_known
from lightning_automodel.plans.tokenwise import keeps_tokens_apart
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

BOUND = 5e-5
SCHEDULE = Schedule(steps=1, micro_batches=2, clip=None)


class MeanOfRow(Gemma3RMSNorm):
    """Divides by the mean square of a whole row of tokens, in a method that its base's forward calls."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + self.eps)


class Root(Gemma3RMSNorm):
    """Writes the method of its base anew: every token alone."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def with_class(family: str, base: type, kind: type) -> nn.Module:
    """Give modules of a class methods of another one."""
    model = tiny_model(family, "sdpa")
    for module in model.modules():
        if type(module) is base:
            module.__class__ = kind
    return model


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Weigh keys by their place in what is given."""
    return query * cos[:, None], key * cos[:, None] * torch.linspace(1, 2, key.shape[-2])[:, None]


def rolled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let what is decorated see the token before."""

    @functools.wraps(forward)
    def around(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x.roll(1, 1))

    return around


def added(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add to what is decorated something that is no part of a sum."""

    @functools.wraps(forward)
    def around(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x) + 0.1

    return around


def errors(sizes: dict[str, int], config: FSDP2Config) -> dict[str, Any]:
    """Runs on each rank."""

    def error(family: str = "llama", *classes: type) -> tuple[float, str]:
        build = functools.partial(with_class, family, *(classes or (object, object)))
        return compare(build, sizes, 2, SCHEDULE, config).largest

    found = {"method": error("gemma3_text", Gemma3RMSNorm, MeanOfRow)}
    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotated):
        found["function"] = error()
    with mock.patch.object(LlamaRMSNorm, "forward", rolled(LlamaRMSNorm.forward)):
        found["decorator"] = error()
    return found


@pytest.mark.parametrize(
    ("sizes", "config"),
    [({"cp": 2}, FSDP2Config()), ({"tp": 2}, FSDP2Config(sequence_parallel=True))],
    ids=["cp", "tp-sp"],
)
def test_tokens_that_meet_there(sizes: dict[str, int], config: FSDP2Config, pool2: Pool) -> None:
    for found in pool2.run(errors, sizes, config):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def refuse_what_is_added() -> str:
    """Runs on each rank: what is said of a decorated method that keeps no sum a sum."""
    with (
        mock.patch.object(LlamaMLP, "forward", added(LlamaMLP.forward)),
        pytest.raises(ValueError, match="summed") as caught,
    ):
        compare(functools.partial(tiny_model, "llama"), {"tp": 2}, 2, SCHEDULE)
    return str(caught.value)


def test_a_decorator_is_to_keep_sums(pool2: Pool) -> None:
    for said in pool2.run(refuse_what_is_added):
        assert "add adds to it what every rank has" in said


def test_what_is_read() -> None:
    assert keeps_tokens_apart(Root(8))
    assert not keeps_tokens_apart(MeanOfRow(8))
    with mock.patch.object(modeling_gemma3.Gemma3RMSNorm, "_norm", MeanOfRow._norm):
        assert functions_of_users(Gemma3RMSNorm(8)) == [MeanOfRow._norm]
    with mock.patch.object(modeling_gemma3.Gemma3RMSNorm, "_norm", property(MeanOfRow._norm)):
        assert functions_of_users(Gemma3RMSNorm(8)) == [MeanOfRow._norm]


def test_what_transformers_writes_is_no_users() -> None:
    for family in ("llama", "gemma3_text", "deepseek_v3", "bloom", "qwen3_next"):
        modules = list(tiny_model(family).modules())
        assert all(map(is_known, modules))
        assert not any(map(functions_of_users, modules))
    assert DeepseekV3MoE.__name__ in {type(module).__name__ for module in tiny_model("deepseek_v3").modules()}
