"""``on_load_checkpoint`` of a user's computes with the entries of a folder, of which nothing has been read yet."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.subjects import gather_part
from tests.support.training import Recorder, batches, fit, make_trainer, whole_parameters

NORM, HEAD = "model.model.norm.weight", "model.lm_head.weight"


class Computing(Recorder):
    """What is written for whole tensors: operators, functions, methods, slices."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state[NORM] = 2 * state[NORM] - state[NORM].clone() / 2
        head = state[HEAD]
        state[HEAD] = torch.cat([head[1:], head[:1].float()])
        with pytest.raises(AttributeError, match=r"mul_: .* would be lost; change tensor.load\(\)"):
            state["model.model.embed_tokens.weight"].mul_(2)


def compute(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Runs on each rank."""
    _, trained = fit({"tp": 2}, directory, epochs=1, module=Recorder(tied=False))
    module = Computing(tied=False)
    make_trainer({}).validate(module, batches(2), ckpt_path=directory / "epoch=0.ckpt", verbose=False)
    return trained, whole_parameters(module)


def test_hooks_compute_with_what_is_not_read(pool2: Pool, tmp_path: Path) -> None:
    for trained, loaded in pool2.run(compute, tmp_path, trainer=True):
        expected = {**trained, NORM: 2 * trained[NORM] - trained[NORM] / 2, HEAD: trained[HEAD].roll(-1, 0)}
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


class Saving(Recorder):
    """Casts, clones and scales what it saves."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = {name: (value.clone() * 2).double() for name, value in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = state


def save_what_was_computed(layout: str, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Runs on each rank: a step, and what its checkpoint holds."""
    module, path = Saving(tied=False), directory / f"{layout}.ckpt"
    run = make_trainer(LAYOUTS[layout].make(), max_steps=1)
    run.fit(module, batches(2))
    run.save_checkpoint(path)
    stored = read_checkpoint(Location.of(path))["state_dict"]
    parameters = {name: gather_part(parameter) for name, parameter in module.named_parameters()}
    return parameters, {name: value.load() for name, value in stored.items()}


@pytest.mark.slow
def test_hooks_compute_with_what_is_saved(pool2: Pool, tmp_path: Path) -> None:
    """In shards, also those of which ranks hold uneven numbers of rows."""
    for layout in ("fsdp2-dp2", "megatron3-dp2"):
        trained, stored = pool2.run(save_what_was_computed, layout, tmp_path, trainer=True)[0]
        assert all(torch.equal(stored[name], 2 * value.double()) for name, value in trained.items())
