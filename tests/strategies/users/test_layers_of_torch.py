"""Modules of torch beside a model that are more than a layer: recurrent ones, encoders, those of TorchScript."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.layouts import LAYOUTS
from tests.support.training import HIDDEN, LENGTH, Recorder, batches, make_trainer, whole_parameters

WIDTH = 8


def recurrent() -> nn.Module:
    return nn.LSTM(HIDDEN, WIDTH, num_layers=2, bidirectional=True, batch_first=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def scripted() -> nn.Module:
    return torch.jit.script(layers())


def traced() -> nn.Module:
    return torch.jit.trace(layers(), torch.zeros(1, LENGTH, HIDDEN))


def lazy() -> nn.Module:
    return nn.LazyLinear(WIDTH)


class Beside(Recorder):
    """A module reads what the model's decoder says of each token, and says which token it is, too."""

    def __init__(self, make: Any, frozen: bool = False) -> None:
        super().__init__()
        self.make, self.frozen = make, frozen
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            with torch.random.fork_rng():
                torch.manual_seed(1)
                self.beside = self.make()
            for parameter in self.beside.parameters() if self.frozen else ():
                parameter.requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0], output_hidden_states=True)
        said = self.beside(output.hidden_states[-1])
        said = said[0] if isinstance(said, tuple) else said
        return output.loss + functional.cross_entropy(said.flatten(0, 1), batch[0].flatten() % said.shape[-1])

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def fitted(make: Any, layout: str | None, frozen: bool = False, saved: Path | None = None) -> dict[str, Any]:
    """Runs on a rank: two epochs; ``saved``: the second one in a trainer of its own, from a checkpoint."""
    chosen = LAYOUTS[layout] if layout else None
    size, module = chosen.data_size if chosen else 1, Beside(make, frozen)
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    for epochs in (1, 2) if saved else (2,):
        trainer = make_trainer(chosen.make() if chosen else "auto", max_epochs=epochs, **arguments)
        resumed = {"ckpt_path": saved, "weights_only": False} if saved and epochs > 1 else {}
        if resumed:
            losses, module = module.losses, Beside(make, frozen)
            module.losses = losses
        trainer.fit(module, batches(size), batches(size), **resumed)
        if saved and epochs == 1:
            trainer.save_checkpoint(saved)
    return {"losses": module.losses, "validated": module.validated[-1], "parameters": whole_parameters(module)}


def check(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["validated"] == pytest.approx(expected["validated"], rel=1e-5)
        for name, value in expected["parameters"].items():
            torch.testing.assert_close(result["parameters"][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2"])
@pytest.mark.parametrize("make", [recurrent, encoder])
def test_they_train_as_on_one_process(make: Any, layout: str, nursery: Nursery, pool2: Pool) -> None:
    [expected] = Pool(nursery, 1).run(fitted, make, None, trainer=True)
    check(pool2.run(fitted, make, layout, trainer=True), expected)


@pytest.mark.parametrize(("make", "layout", "frozen"), [(scripted, "fsdp2-dp2", True), (traced, "ddp-2", False)])
def test_of_torchscript(make: Any, layout: str, frozen: bool, tmp_path: Path, nursery: Nursery, pool2: Pool) -> None:
    [expected] = Pool(nursery, 1).run(fitted, make, None, frozen, trainer=True)
    check(pool2.run(fitted, make, layout, frozen, tmp_path / "epoch.ckpt", trainer=True), expected)


class Copying(Recorder):
    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.model)


def fit_copying(layout: str) -> None:
    make_trainer(LAYOUTS[layout].make(), max_steps=1).fit(Copying(), batches(2))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fitted, (scripted, "fsdp2-dp2"), "beside is a module of TorchScript"),
        (fitted, (lazy, "fsdp2-dp2"), r"beside.weight \(LazyLinear\) has no shape before a first forward pass"),
        (fitted, (lazy, "ddp-2"), r"beside.weight \(LazyLinear\) has no shape before a first forward pass"),
        (fit_copying, ("fsdp2-dp2",), "copy the model in configure_model"),
        (fit_copying, ("megatron3-dp2",), "copy the model in configure_model"),
    ],
    ids=["scripted", "lazy", "lazy-ddp", "copied", "copied-megatron"],
)
def test_what_cannot_be_is_said(function: Any, arguments: tuple[Any, ...], message: str, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=message):
        pool2.run(function, *arguments, trainer=True)
