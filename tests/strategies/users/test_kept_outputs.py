"""Losses of what a block leaves beside its output alone: attention maps that transformers records inside of it, and
what a hook of the user's keeps.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.changes import ALONE, changed
from tests.support.layouts import LAYOUTS
from tests.support.training import Descending, tiny_llama

COMPILED = {"enable_compile": True, "compile_backend": "aot_eager"}


class FirstMap(Descending):
    """The loss is of the attention map of one block, whose output it does not read."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama(tied=False)
            self.model.set_attn_implementation("eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        maps = self.model(input_ids=batch[0], output_attentions=True).attentions[0]
        return 1000 * (maps * torch.arange(maps[0].numel()).view(maps[0].shape).sin()).square().mean()


class Kept(FirstMap):
    """The loss is of what a hook has seen."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        seen: list[Tensor] = []

        def keep(mlp: nn.Module, args: tuple, output: Tensor) -> None:
            seen.append(output)

        with self.model.model.layers[0].mlp.register_forward_hook(keep):
            self.model(input_ids=batch[0])
        return seen[0].square().mean()


class Asking(FirstMap):
    """Asks for the gradient of a block's hidden states, as attributions do; of 8 tokens, which two ranks can cut."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids = torch.cat([batch[0], batch[0][:, :2]], dim=1)
        output = self.model(input_ids=ids, labels=ids, output_hidden_states=True)
        (gradient,) = torch.autograd.grad(output.loss, output.hidden_states[1], retain_graph=True)
        return output.loss + gradient.norm()


def fitted(kind: type[Descending], layout: str, levers: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank."""
    return changed(kind(), tiny_llama(tied=False), layout, levers)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("fsdp2-dp2", {}),
    ("fsdp2-dp2", COMPILED),
    ("fsdp2-dp2", {"activation_checkpointing": True}),
    ("fsdp2-dp2-tp2", {}),
    ("megatron3-dp2", {}),
]


@pytest.mark.parametrize(("layout", "levers"), CASES)
def test_loss_of_one_attention_map(layout: str, levers: dict[str, Any], nursery: Nursery) -> None:
    (one,) = Pool(nursery, 1).run(fitted, FirstMap, ALONE, {}, trainer=True)
    many = Pool(nursery, LAYOUTS[layout].ranks).run(fitted, FirstMap, layout, levers, trainer=True, timeout=100)[0]
    assert one.keys() == many.keys()
    assert one["model.model.layers.0.self_attn.k_proj.weight"].norm() > 0
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm(), name


WAYS_OUT = {
    "fsdp2-dp2": "add that loss to one of what the model returns",
    "megatron3-dp2": "or use zero_dp_strategy=2, which keeps parameters whole",
}


@pytest.mark.parametrize("layout", WAYS_OUT)
def test_loss_of_what_a_hook_kept_names_the_way_out(layout: str, nursery: Nursery) -> None:
    with pytest.raises(RankFailed, match=re.escape(WAYS_OUT[layout])):
        Pool(nursery, 2).run(fitted, Kept, layout, {}, trainer=True)


def test_parameters_that_are_whole_need_no_way_out(nursery: Nursery) -> None:
    (one,) = Pool(nursery, 1).run(fitted, Kept, ALONE, {}, trainer=True)
    many = Pool(nursery, 2).run(fitted, Kept, "megatron2-dp2", {}, trainer=True)[0]
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm(), name


def test_gradients_of_gathered_hidden_states_are_told(nursery: Nursery) -> None:
    with pytest.raises(RankFailed, match="are gathered copies, from which its loss does not come"):
        Pool(nursery, 2).run(fitted, Asking, "fsdp2-cp2", {}, trainer=True)
