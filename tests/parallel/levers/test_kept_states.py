"""Checkpointed blocks that keep something from pass to pass (running statistics, codebooks, counters): what is computed
again finds what the forward pass found, and changes nothing a second time.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils.parametrizations import spectral_norm
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_automodel.parallel.activation_checkpointing.blocks import apply_activation_checkpointing
from lightning_automodel.parallel.compile import apply_compile
from tests.parallel.levers.support import gradients, token_ids
from tests.support.families import tiny_model

STEPS = 3


class Keeping(LlamaMLP):
    """Everything that a pass may change: a buffer in place, a new one, a batch norm's, numbers, what was not there."""

    count = 0

    def keep(self) -> None:
        self.statistics = nn.BatchNorm1d(4, momentum=0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.ones(()))
        self.threshold = 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self._move(x)
        if not hasattr(self, "first"):
            self.first = float(self.seen)
        scale = self.mean * (self.seen + self.count + self.threshold) / (1 + self.first)
        return super().forward(x) * scale + self.statistics(x.mean(1, keepdim=True).expand(-1, 4, -1))[:, :1].tanh()

    @torch.no_grad()
    def _move(self, x: Tensor) -> None:
        self.seen.add_(1)
        self.threshold *= 1.5
        self.mean = 0.9 * self.mean + 0.1 * x.square().mean()


def keeping() -> Any:
    model: Any = tiny_model("llama", attention="sdpa").train()
    for layer in model.model.layers:
        layer.mlp.__class__ = Keeping
        layer.mlp.keep()
        spectral_norm(layer.mlp.up_proj)
    return model


def run(model: Any) -> dict[str, Any]:
    """Gradients of some steps, buffers, and numbers of the first layer."""
    first = model.model.layers[0].mlp
    found = {**gradients(model, token_ids(), steps=STEPS), **{f"kept {n}": b for n, b in model.named_buffers()}}
    return {**found, "numbers": torch.tensor([first.count, first.threshold, first.first])}


@pytest.mark.parametrize("mode", [True, "selective", "submodule", "asked"])
def test_blocks_change_what_they_keep_once(mode: Any) -> None:
    plain = keeping()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, mode != "asked" and mode)
    if mode == "asked":
        model.gradient_checkpointing_enable()
    expected, found = run(plain), run(model)
    assert int(expected["numbers"][0]) == STEPS
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("keeps", [True, False])
def test_compiled_they_train_uncompiled(keeps: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = keeping() if keeps else tiny_model("llama", attention="sdpa").train()
    for layer in plain.model.layers:
        layer.register_buffer("table", torch.ones(2), persistent=False)  # which is only read, if at all
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model)
    apply_compile(model, backend="aot_eager")
    expected, found = (gradients(m, token_ids(), steps=STEPS) for m in (plain, model))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert bool(counters["stats"]["unique_graphs"]) is not keeps


def test_a_graph_that_is_kept_is_computed_again_alike() -> None:
    model = keeping()
    apply_activation_checkpointing(model)
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    passes = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        passes.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(passes[0][name], value) for name, value in passes[1].items())
    assert float(model.model.layers[0].mlp.seen) == 1
