"""Models whose own code, a user's, computes with the weight of a layer that tensor parallelism splits."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

BOUND = 1e-5


class Penalized(LlamaForCausalLM):
    """Adds a norm to the loss of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 0.01 * self.penalty()
        return output

    def penalty(self) -> Any:
        return self.lm_head.weight.square().sum()


class OfEmbedding(Penalized):
    """The norm is of the other end."""

    def penalty(self) -> Any:
        return self.model.embed_tokens.weight.square().sum()


class ByMethod(Penalized):
    """The layer has no name."""

    def penalty(self) -> Any:
        return self.get_output_embeddings().weight.square().sum()


class Fused(LlamaForCausalLM):
    """Computes logits itself, as kernels of a fused loss do."""

    def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        output = self.model(input_ids, **kwargs)
        logits = functional.linear(output.last_hidden_state, self.lm_head.weight)
        output.loss = self.loss_function(logits, labels, self.config.vocab_size)
        return output


class Harmless(LlamaForCausalLM):
    """Asks for what each part tells, and writes in another method."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss.to(self.lm_head.weight.dtype) + 0.01 * self.model.norm.weight.square().sum()
        return self.beside(output)

    def beside(self, output: Any) -> Any:
        output.loss = output.loss + 0.01 * self.extra.lm_head.weight.square().sum()  # whole, under a name of the head's
        return output

    def again(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight


def make(kind: type[nn.Module]) -> nn.Module:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.__class__ = kind
    if kind is Harmless:
        model.extra = nn.ModuleDict({"lm_head": nn.LayerNorm(8)})
    return model


def patched() -> nn.Module:
    model = make(LlamaForCausalLM)
    model.forward = MethodType(functools.wraps(LlamaForCausalLM.forward)(Fused.forward), model)
    return model


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "lm_head": functools.partial(make, Penalized),
    "model.embed_tokens": functools.partial(make, OfEmbedding),
    **{f"lm_head, {kind.__name__}": functools.partial(make, kind) for kind in (ByMethod, Fused)},
    "lm_head, patched": patched,
}


def refusals(config: FSDP2Config) -> dict[str, str]:
    """Runs on each rank."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    for name, build in REFUSED.items():
        with pytest.raises(ValueError, match="reads the weight of") as caught:
            parallelize(build(), mesh, config)
        found[name] = str(caught.value)
    return found


def errors(config: FSDP2Config) -> dict[str, tuple[float, str]]:
    """Runs on each rank: by the way out that is told, and where a part tells the same."""
    found = {"harmless": compare(functools.partial(make, Harmless), {"tp": 2}, 2, Schedule(steps=2), config).largest}
    for name, build in REFUSED.items():
        way_out = FSDP2Config(
            sequence_parallel=config.sequence_parallel,
            tp_plan={"extends": "model", name.partition(",")[0]: "replicate"},
        )
        found[name] = compare(build, {"tp": 2}, 2, Schedule(steps=2), way_out).largest
    return found


@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_weights_of_which_a_rank_has_a_part_are_not_read(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(refusals, FSDP2Config(sequence_parallel=sequence_parallel)):
        for name, said in found.items():
            layer = name.partition(",")[0]
            assert f"reads the weight of {layer}, of which each tp rank" in said
            assert f"{layer!r}: 'replicate'" in said


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], True))
def test_they_may_be_whole(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors, FSDP2Config(sequence_parallel=sequence_parallel)):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}
