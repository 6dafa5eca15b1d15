"""The module: evaluation is exact, state survives, the model is built once and as asked."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.callbacks import TQDMStepBar
from lightning_automodel.finetuning import CausalLM, TextDataModule, WarmupCosine
from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.testing.pool import Pool
from tests.support.training import SaveAfter, whole_parameters

Batch = dict[str, torch.Tensor]


def _batches(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index in range(count):
        ids = torch.randint(4, 300, (1 + index, 8 + 3 * index), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3 * index, -100)
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def _loader(batches: list[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _trainer(directory: Path, **changes: Any) -> L.Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 3, "logger": False, "enable_progress_bar": False}
    return L.Trainer(default_root_dir=directory, **(settings | changes))


def test_evaluation_is_the_mean_over_all_tokens(model_dir: Path, tmp_path: Path) -> None:
    batches = _batches()
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    with torch.no_grad():
        total = sum(float(model(**batch, num_items_in_batch=1).loss) for batch in batches)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    module, trainer = CausalLM(str(model_dir)), _trainer(tmp_path)
    (val,) = trainer.validate(module, _loader(batches), verbose=False)
    (test,) = trainer.test(module, _loader(batches), verbose=False)
    assert val["val/loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert test["test/loss"] == val["val/loss"]
    assert val["val/perplexity"] == pytest.approx(torch.tensor(val["val/loss"]).exp().item(), rel=1e-6)


def test_prediction_scores_each_row(model_dir: Path, tmp_path: Path) -> None:
    batches = _batches()
    scores = _trainer(tmp_path).predict(CausalLM(str(model_dir)), _loader(batches))
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    for batch, score in zip(batches, scores, strict=True):
        assert score["tokens"].tolist() == (batch["labels"][:, 1:] != -100).sum(1).tolist()
        with torch.no_grad():
            total = float(model(**batch, num_items_in_batch=1).loss)
        assert -score["log_likelihood"].sum() == pytest.approx(total, rel=1e-5)


def test_fit_logs_what_a_run_is_judged_by(model_dir: Path, tmp_path: Path) -> None:
    module, trainer = CausalLM(str(model_dir)), _trainer(tmp_path, max_steps=4)
    trainer.validate(module, _loader(_batches()), verbose=False)
    trainer.fit(module, _loader(_batches()), _loader(_batches()))
    assert module.model is not None
    assert module.model.training
    logged = trainer.callback_metrics
    assert {"train/loss", "train/tokens", "lr", "val/loss", "val/perplexity"} <= set(logged)
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in _batches()]
    assert logged["train/tokens"] == sum(tokens)
    assert not {"train/loss", "lr"} & set(trainer.progress_bar_metrics)  # no bar: nothing is read after every batch


@pytest.mark.parametrize(("bar", "is_shown"), [(TQDMProgressBar(), True), (TQDMStepBar(), False)])
def test_lightnings_bars_show_the_loss(model_dir: Path, tmp_path: Path, bar: ProgressBar, is_shown: bool) -> None:
    trainer = _trainer(tmp_path, enable_progress_bar=True, callbacks=[bar], max_steps=1)
    trainer.fit(CausalLM(str(model_dir)), _loader(_batches()))
    assert ({"train/loss", "lr"} <= set(trainer.progress_bar_metrics)) == is_shown  # our bar reads what is logged


def test_a_resumed_run_is_the_uninterrupted_one(model_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number) for number in range(400)))

    def fit(max_steps: int, ckpt_path: str | None = None) -> tuple[L.Trainer, CausalLM]:
        data = TextDataModule(train_files=str(text), sequence_length=16, batch_size=2, cache_dir=str(tmp_path))
        module = CausalLM(
            str(model_dir),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            lr_scheduler=lambda optimizer: WarmupCosine(optimizer, total_steps=25),
        )
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = _trainer(tmp_path, max_steps=max_steps, accumulate_grad_batches=2, callbacks=[checkpoint])
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer, module

    whole, expected = fit(25)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    fit(9)
    second, resumed = fit(25, str(tmp_path / "step=7.ckpt"))
    assert whole.current_epoch == second.current_epoch > 0  # it stopped in the middle of the first epoch
    assert whole.callback_metrics["train/tokens"] == second.callback_metrics["train/tokens"]
    assert whole.callback_metrics["lr"] == second.callback_metrics["lr"]
    for ours, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_schedule_takes_the_length_of_the_run(model_dir: Path, tmp_path: Path) -> None:
    module, trainer = (
        CausalLM(str(model_dir)),
        _trainer(tmp_path, max_steps=-1, max_epochs=2, accumulate_grad_batches=3),
    )
    trainer.fit(module, _loader(_batches()))
    assert module.lr_schedulers().total_steps == trainer.global_step == 4  # type: ignore[union-attr]


def test_random_weights_need_a_config_only(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(
        ValueError, match=rf"'{tmp_path}' has none of model.safetensors.*it holds config.json.*from_scratch"
    ):
        CausalLM(str(tmp_path))
    kwargs = {"attn_implementation": "eager", "dtype": "bfloat16", "num_hidden_layers": 1}
    module = CausalLM(str(tmp_path), from_scratch=True, model_kwargs=kwargs)
    module.configure_model()
    built = module.model
    module.configure_model()
    assert built is not None
    assert module.model is built
    assert built.config._attn_implementation == "eager"
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
    assert len(built.model.layers) == 1


MISTAKES = {
    "num_hidden_layer": (1, "no field of LlamaConfig, and no argument of its model; did you mean .*num_hidden_layers"),
    "num_hidden_layers": ("two", "its config refuses a value: Field 'num_hidden_layers' expected int, got str"),
    "zyx": (1, "no argument of its model; leave it out"),
    "dtype": ("bfloat17", "model_kwargs.dtype='bfloat17' is no dtype of torch"),
}


@pytest.mark.parametrize("from_scratch", [True, False])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_arguments_of_a_model(model_dir: Path, name: str, from_scratch: bool) -> None:
    value, expected = MISTAKES[name]
    module = CausalLM(str(model_dir), from_scratch=from_scratch, model_kwargs={name: value})
    with pytest.raises(ValueError, match=expected):
        module.configure_model()


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "some/deep/path"])
def test_a_directory_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"model='{name}' is not a directory"):
        CausalLM(name)


def test_the_schedule_warms_up_and_ends_at_its_share() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupCosine(optimizer, warmup=4, final=0.25, total_steps=20)
    rates = []
    for _ in range(22):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == rates[21] == pytest.approx(0.25)


def test_a_schedule_without_an_end_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"total_steps=.* needs a run that ends"):
        _trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(CausalLM(str(model_dir)), _loader(_batches()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for arguments in ({"warmup": -1.0}, {"final": 2.0}, {"total_steps": 0}):
        with pytest.raises(ValueError, match=r"WarmupCosine\("):
            WarmupCosine(optimizer, **arguments)  # type: ignore[arg-type]


def _train_from(model_dir: Path, path: Path, resume: Path | None) -> dict[str, torch.Tensor]:
    module = CausalLM(str(model_dir), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), lr_scheduler=None)
    loader = ResumableLoader(_batches(6), batch_size=None)  # type: ignore[arg-type]
    settings = {"devices": 2, "strategy": FSDP2TPStrategy(tp=2), "max_steps": -1, "max_epochs": 1}
    trainer = _trainer(
        path.parent, callbacks=[SaveAfter(path, 2)], accumulate_grad_batches=3, enable_checkpointing=False, **settings
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


@pytest.mark.slow
def test_a_step_that_was_interrupted_weighs_all_its_tokens(pool2: Pool, model_dir: Path, tmp_path: Path) -> None:
    """The checkpoint lies between its second and third micro-batch, which have different numbers of targets."""
    path = tmp_path / "two.ckpt"
    expected = pool2.run(_train_from, model_dir, path, None, trainer=True)[0]
    actual = pool2.run(_train_from, model_dir, tmp_path / "x.ckpt", path, trainer=True)[0]
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


LORA = {"r": 3, "target_modules": "all-linear"}


def _adapt(model_dir: Path, directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    trained = {}
    for name, distributed in (("folder", True), ("file", False)):
        module = CausalLM(str(model_dir), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), lr_scheduler=None, peft=LORA)
        strategy = FSDP2TPStrategy(tp=2, save_distributed_checkpoint=distributed)
        trainer = _trainer(directory, devices=2, strategy=strategy, max_steps=1, enable_checkpointing=False)
        trainer.fit(module, _loader(_batches()))
        trainer.save_checkpoint(directory / name)
        trained[name] = whole_parameters(module)
    return trained


@pytest.mark.slow
def test_load_from_checkpoint_adds_the_base_of_an_adapter(pool2: Pool, model_dir: Path, tmp_path: Path) -> None:
    expected = pool2.run(_adapt, model_dir, tmp_path, trainer=True)[0]
    for kind in ("file", "folder"):
        loaded = CausalLM.load_from_checkpoint(tmp_path / kind, model=str(model_dir), peft=LORA)
        assert all(torch.equal(value, expected[kind][name]) for name, value in loaded.named_parameters())
