"""``on_load_checkpoint`` of a user's computes with the entries of a folder, of which nothing has been read yet."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel.testing.pool import Pool
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
