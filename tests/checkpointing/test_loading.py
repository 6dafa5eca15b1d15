"""What may be loaded, how much of it, and what the user is told when it may not."""

import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.training import (
    HIDDEN,
    VOCABULARY,
    Recorder,
    batches,
    fit,
    make_trainer,
    tiny_llama,
    whole_parameters,
)


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is returned
        function(*args, **kwargs)
    return str(caught.value)


# ---- weights_only ----------------------------------------------------------------------------------------------------


class WithObject(Recorder):
    """Keeps an object in its checkpoint that only a full unpickling brings back."""

    loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = UserDict(answer=42)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


class AfterSetup(FSDP2TPStrategy):
    """Loads when Lightning's own strategy does, where Trainer forgets what the user said."""

    restore_checkpoint_after_setup = True  # type: ignore[assignment]


def resume_with_objects(directory: Path, distributed: bool) -> dict[str, Any]:
    fit({"tp": 2, "save_distributed_checkpoint": distributed}, directory, epochs=1, module=WithObject())
    run = make_trainer({"tp": 2}, max_epochs=2)
    path = directory / "epoch=0.ckpt"
    module = WithObject()
    refused = message_of(run.fit, module, batches(1), ckpt_path=path)
    run = make_trainer({"tp": 2}, max_epochs=2)
    run.fit(module, batches(1), ckpt_path=path, weights_only=False)
    late = make_trainer(AfterSetup(tp=2), max_epochs=2)
    stock = message_of(late.fit, WithObject(), batches(1), ckpt_path=path, weights_only=False)
    return {"refused": refused, "loaded": module.loaded["answer"], "steps": len(module.losses), "stock": stock}


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_weights_only_is_the_users_choice(pool2: Pool, tmp_path: Path, distributed: bool) -> None:
    for result in pool2.run(resume_with_objects, tmp_path, distributed, trainer=True):
        assert "weights_only=False" in result["refused"]
        assert "UserDict" in result["refused"]
        assert (result["loaded"], result["steps"]) == (42, 4)
        assert "weights_only=True refuses" in result["stock"]


# ---- weights without the rest ----------------------------------------------------------------------------------------


def evaluate_best(directory: Path, distributed: bool) -> dict[str, Any]:
    module = Recorder()
    saver = ModelCheckpoint(directory, monitor="val_loss", save_weights_only=True, save_top_k=1)
    run = make_trainer(
        {"tp": 2, "save_distributed_checkpoint": distributed},
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    run.fit(module, batches(1), batches(1))
    expected = whole_parameters(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    run.test(module, batches(1), ckpt_path="best", verbose=False)
    validated = Recorder()
    other = make_trainer({"dp_shard": 2})
    other.validate(validated, batches(2), ckpt_path=saver.best_model_path, verbose=False)
    refused = message_of(other.fit, Recorder(), batches(2), ckpt_path=saver.best_model_path)
    equal = [
        all(torch.equal(value, expected[name]) for name, value in whole_parameters(m).items())
        for m in (module, validated)
    ]
    return {
        "equal": equal,
        "refused": refused,
        "loss": float(other.callback_metrics["val_loss"]),
        "best": saver.best_model_score,
    }


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_weights_alone_can_be_evaluated_but_not_resumed(pool2: Pool, tmp_path: Path, distributed: bool) -> None:
    for result in pool2.run(evaluate_best, tmp_path, distributed, trainer=True):
        assert result["equal"] == [True, True]
        assert result["loss"] == pytest.approx(float(result["best"]), abs=1e-6)
        assert "weights only" in result["refused"]
        assert "trainer.validate" in result["refused"]


class WithHooks(Recorder):
    """Leaves parameters out of its checkpoint, renames one on the way back, and sets one itself."""

    strict_loading = False
    shown: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["whole"] = self.model.lm_head.weight
        for name in [name for name in state if ".layers.1." in name]:
            del state[name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.shown = {name: tuple(value.shape) for name, value in state.items()}
        assert type(checkpoint["whole"]) is Tensor
        assert checkpoint["whole"].shape == (VOCABULARY, HIDDEN)
        first, second = (f"model.model.layers.{i}.mlp.up_proj.weight" for i in range(2))
        state[second] = state.pop(first)
        state["model.model.norm.weight"] = torch.full((HIDDEN,), 0.5)
        state["unknown"] = torch.zeros(1)


def load_through_hooks(directory: Path, distributed: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    _, trained = fit({"tp": 2, "save_distributed_checkpoint": distributed}, directory, epochs=1, module=WithHooks())
    module = WithHooks()
    run = make_trainer({"tp": 2})
    run.validate(module, batches(1), ckpt_path=directory / "epoch=0.ckpt", verbose=False)
    return trained, whole_parameters(module), module.shown


@pytest.mark.parametrize("distributed", [True, False])
def test_hooks_and_partial_checkpoints(pool2: Pool, tmp_path: Path, distributed: bool) -> None:
    trained, loaded, shown = pool2.run(load_through_hooks, tmp_path, distributed, trainer=True)[0]
    assert shown["model.lm_head.weight"] == (VOCABULARY, HIDDEN)
    assert not any(".layers.1." in name for name in shown)
    name = "model.model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(loaded[name.format(1)], trained[name.format(0)])
    assert not torch.equal(loaded[name.format(0)], trained[name.format(0)])
    assert torch.equal(loaded["model.model.norm.weight"], torch.full((HIDDEN,), 0.5))
    query = "model.model.layers.{}.self_attn.q_proj.weight"
    assert torch.equal(loaded[query.format(0)], trained[query.format(0)])
    assert not torch.equal(loaded[query.format(1)], trained[query.format(1)])


def load_another_model(directory: Path) -> list[str]:
    fit({"tp": 2}, directory, epochs=1, module=Recorder(tied=True))
    path = directory / "epoch=0.ckpt"
    untied = Recorder(tied=False)
    run = make_trainer({"tp": 2})
    run.validate(untied, batches(1), ckpt_path=path, verbose=False)
    parameters = whole_parameters(untied)
    assert torch.equal(parameters["model.lm_head.weight"], parameters["model.model.embed_tokens.weight"])

    class Wider(Recorder):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.lm_head = torch.nn.Linear(HIDDEN, 60, bias=False)

    class Larger(Recorder):
        def configure_model(self) -> None:
            super().configure_model()
            self.more = torch.nn.Linear(2, 2)

    return [
        message_of(make_trainer({"tp": 2}).validate, module, batches(1), ckpt_path=path)
        for module in (Wider(tied=False), Larger())
    ]


@pytest.mark.slow
def test_a_checkpoint_of_another_model(pool2: Pool, tmp_path: Path) -> None:
    shape, names = pool2.run(load_another_model, tmp_path, trainer=True)[0]
    assert "lm_head.weight has the shape (61, 24) in the checkpoint and (60, 24) in the model" in shape
    assert ".ckpt cannot be loaded" in shape
    assert "missing: more.weight, more.bias" in names
    assert "strict_loading=False" in names


# ---- a state_dict of the user's own ----------------------------------------------------------------------------------


class Converting(Recorder):
    """Shows copies of its parameters in another dtype."""

    prefix = ""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {self.prefix + name: value.double() for name, value in state.items()}


class Renaming(Converting):
    """And under other names."""

    prefix = "my."


def load_what_was_copied(directory: Path) -> tuple[float, str]:
    _, trained = fit({"tp": 2}, directory, epochs=1, module=Converting())
    path = directory / "epoch=0.ckpt"
    module = Converting()
    make_trainer({}).validate(module, batches(2), ckpt_path=path, verbose=False)
    loaded = whole_parameters(module)
    fit({"tp": 2}, directory / "renamed", epochs=1, module=Renaming())
    path = directory / "renamed/epoch=0.ckpt"
    refused = message_of(make_trainer({"tp": 2}).validate, Renaming(), batches(1), ckpt_path=path, verbose=False)
    return max(float((value - trained[name]).abs().max()) for name, value in loaded.items()), refused


@pytest.mark.slow
def test_what_is_loaded_does_not_go_into_a_copy(pool2: Pool, tmp_path: Path) -> None:
    for difference, refused in pool2.run(load_what_was_copied, tmp_path, trainer=True):
        assert difference == 0
        assert "state_dict of Renaming shows my.model.model.embed_tokens.weight" in refused
        assert "on_load_checkpoint" in refused


class Noting(Recorder):
    """Adds entries of its own, and takes them out again where it loads."""

    note = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "note": torch.tensor(7)}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        state = dict(state_dict)
        self.note = int(state.pop("note"))
        return super().load_state_dict(state, strict=strict)


class Delegating(Recorder):
    """Names its entries itself, and lets the models within it load."""

    def configure_model(self) -> None:
        super().configure_model()
        self.other = torch.nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        parts = {"m": self.model, "o": self.other}
        return {f"{n}.{name}": v for n, m in parts.items() for name, v in m.state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.other.load_state_dict({n[2:]: v for n, v in state_dict.items() if n.startswith("o.")}, strict=strict)
        found = self.model.load_state_dict({n[2:]: v for n, v in state_dict.items() if n.startswith("m.")}, strict)
        assert not found.missing_keys
        return found


def load_what_was_named(directory: Path, distributed: bool) -> list[float]:
    differences = []
    for kind in (Noting, Delegating):
        sizes = {"tp": 2, "save_distributed_checkpoint": distributed}
        path = directory / kind.__name__
        _, trained = fit(sizes, path, epochs=1, module=kind())
        module = kind()
        make_trainer({}).validate(module, batches(2), ckpt_path=path / "epoch=0.ckpt", verbose=False)
        loaded = whole_parameters(module)
        differences.append(max(float((value - trained[name]).abs().max()) for name, value in loaded.items()))
        assert getattr(module, "note", 7) == 7
    return differences


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_methods_that_add_entries_or_load_parts(pool2: Pool, tmp_path: Path, distributed: bool) -> None:
    assert pool2.run(load_what_was_named, tmp_path, distributed, trainer=True) == [[0, 0]] * 2


class Hooked(Recorder):
    """Would halve a weight before it is loaded."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.register_load_state_dict_pre_hook(halve)


def halve(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}model.norm.weight"] /= 2


def load_with_hook(directory: Path) -> list[str]:
    fit({"tp": 2}, directory, epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (Recorder(), Hooked()):
            run = make_trainer({"tp": 2})
            run.validate(module, batches(1), ckpt_path=directory / "epoch=0.ckpt", verbose=False)
    return [str(warning.message) for warning in caught if "load_state_dict" in str(warning.message)]


@pytest.mark.slow
def test_a_hook_that_is_not_called_is_named(pool2: Pool, tmp_path: Path) -> None:
    (said,) = pool2.run(load_with_hook, tmp_path, trainer=True)[0]
    assert said.startswith("model has a hook before load_state_dict (halve)")
    assert "on_load_checkpoint" in said


# ---- without a strategy ----------------------------------------------------------------------------------------------


class Scaled(Recorder):
    """Has a hyperparameter."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_load_from_checkpoint_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    module, run = Scaled(scale=3.0), make_trainer({}, max_steps=1)
    run.fit(module, batches(1))
    run.save_checkpoint(tmp_path / "folder.ckpt")
    loaded = Scaled.load_from_checkpoint(tmp_path / "folder.ckpt")
    assert loaded.hparams["scale"] == 3.0
    expected = whole_parameters(module)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    assert (tmp_path / "folder.ckpt" / "meta.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"folder.ckpt/meta.pt is damaged"):
        Scaled.load_from_checkpoint(tmp_path / "folder.ckpt")


# ---- files of something else -----------------------------------------------------------------------------------------


def test_what_no_trainer_saved(tmp_path: Path) -> None:
    for name, value in {"weights": tiny_llama().state_dict(), "list": [1]}.items():
        torch.save(value, tmp_path / name)
        for run in (make_trainer({}, max_epochs=1).fit, make_trainer({}).validate):
            with pytest.raises(ValueError, match=f"{name} was not saved by a Trainer: it is a .*load_state_dict"):
                run(Recorder(), batches(1), ckpt_path=tmp_path / name)
