"""Optimizers that users write: what they keep beside a tensor per parameter goes on where it was, in any layout."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import Recorder, SaveAfter, batches, make_trainer

BATCHES, SAVED_AFTER = 4, 5


class Keeping(Optimizer):
    """Counts steps in an attribute that its ``state_dict`` adds; a hook adds another number.

    Its states are in containers: a mapping, a list of gradients, a pair.
    """

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.steps, self.scale = 0, torch.ones(())
        self.register_state_dict_post_hook(lambda _, state: state.update(scale=self.scale))
        self.register_load_state_dict_pre_hook(lambda _, state: setattr(self, "scale", state["scale"]))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.steps, self.scale = self.steps + 1, self.scale * 0.9
        for group in self.param_groups:
            for parameter in group["params"]:
                change = self.change(parameter.grad, self.state[parameter])
                parameter.add_(change, alpha=-group["lr"] * float(self.scale) / self.steps**0.5)
        return loss

    def change(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        moments = state.setdefault("moments", OrderedDict(first=torch.zeros_like(gradient)))
        moments["first"].mul_(0.9).add_(gradient)
        state["history"] = [*state.get("history", []), gradient.clone()][-2:]
        second, count = state.get("pair", (torch.zeros_like(gradient), 0))
        state["pair"] = (second * 0.5 + gradient, count + 1)
        return moments["first"] + sum(state["history"]) + state["pair"][0] / state["pair"][1]


class Kept(Recorder):
    def configure_optimizers(self) -> Any:
        return Keeping(self.parameters(), lr=0.05)


def run(layout: str | None, folder: bool, path: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: saves behind batch 5 of 8, or goes on from there."""
    module, chosen = Kept(), LAYOUTS[layout] if layout else None
    strategy = chosen.make(save_distributed_checkpoint=folder) if chosen else "auto"
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[SaveAfter(path, SAVED_AFTER)] if path else [])
    trainer.fit(module, batches(chosen.data_size if chosen else 1), ckpt_path=resume)
    parameters = {name: gather_part(p) for name, p in module.named_parameters()}
    return {"losses": module.losses, "parameters": parameters}


WAYS = {
    "tp2 to dp2": ("fsdp2-tp2", True, "fsdp2-dp2"),
    "dp2 to dp2, one file": ("fsdp2-dp2", False, "fsdp2-dp2"),
    "megatron to tp2": ("megatron3-dp2", True, "fsdp2-tp2"),
    "tp2 to megatron, one file": ("fsdp2-tp2", False, "megatron1-dp2"),
}


@pytest.mark.parametrize("way", with_long(WAYS, "tp2 to megatron, one file"))
def test_they_go_on_as_on_one_process(way: str, nursery: Nursery, pool2: Pool, tmp_path: Path) -> None:
    """On ranks of Megatron-FSDP with an empty part of a parameter, too, also behind the checkpoint."""
    source, folder, target = WAYS[way]
    one = Pool(nursery, 1).run(run, None, True, None, None, trainer=True)[0]
    path = tmp_path / "mid.ckpt"
    whole = pool2.run(run, source, folder, path, None, trainer=True)[0]
    again = pool2.run(run, target, folder, None, path, trainer=True)[0]
    for found, done in ((whole, 0), (again, SAVED_AFTER)):
        assert found["losses"] == pytest.approx(one["losses"][done:], abs=1e-5)
        torch.testing.assert_close(found["parameters"], one["parameters"], rtol=1e-4, atol=1e-6)
