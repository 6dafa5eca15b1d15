"""Streams and mixtures give the rows of the same documents."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.finetuning import CausalLM, TextDataModule
from lightning_automodel.finetuning.mixture import repeat
from lightning_automodel.testing.pool import Pool
from tests.support.training import make_trainer, whole_parameters, world_size


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for index in range(12):
        (folder / f"{index:02}.txt").write_text(f"{index}: the lazy dog sleeps. " * (index + 1))
    return folder


def _data(model_dir: Path, tmp_path: Path, **settings: Any) -> TextDataModule:
    given = {"sequence_length": 16, "cache_dir": str(tmp_path / "cache"), **settings}
    return TextDataModule(tokenizer=str(model_dir), **given)


def _tokens(loader: Any) -> Counter[int]:
    return Counter(int(token) for batch in loader for token in batch["labels"].flatten() if token >= 0)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_has_the_tokens_of_the_files(model_dir: Path, tmp_path: Path, files: Path, packing: bool) -> None:
    kept = _data(model_dir, tmp_path, train_files=f"{files}/*.txt", packing=packing)
    kept.setup("fit")
    stream = _data(model_dir, tmp_path / "none", train_files=f"{files}/*.txt", packing=packing, streaming=True)
    stream.prepare_data()
    stream.setup("fit")
    assert _tokens(stream.train_dataloader()) == _tokens(kept.train_dataloader())
    assert not (tmp_path / "none").exists()


def _fit(model: str, root: str, files: str, steps: int, path: str | None = None) -> list[torch.Tensor]:
    """Trains on windows of two rows, and returns the parameters."""
    L.seed_everything(3)
    data = _data(Path(model), Path(root), train_files=f"{files}/*.txt", streaming=True)
    module = CausalLM(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), lr_scheduler=None)
    strategy = FSDP2TPStrategy(config=FSDP2Config(backend="gloo"))
    trainer = make_trainer(strategy, max_steps=steps, accumulate_grad_batches=2 // world_size())
    trainer.fit(module, data, ckpt_path=path)
    trainer.save_checkpoint(f"{root}/{steps}.ckpt")
    return list(whole_parameters(module).values())


@pytest.mark.slow
def test_a_stream_is_divided_and_goes_on(model_dir: Path, tmp_path: Path, files: Path, pool2: Pool) -> None:
    given = (str(model_dir), str(tmp_path), str(files))
    whole, _ = pool2.run(_fit, *given, 4, trainer=True)
    pool2.run(_fit, *given, 2, trainer=True)
    resumed, _ = pool2.run(_fit, *given, 4, str(tmp_path / "2.ckpt"), trainer=True)
    alone = _fit(*given, 4)
    for one, again, of_one_process in zip(whole, resumed, alone, strict=True):
        torch.testing.assert_close(again, one, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one, of_one_process, rtol=1e-5, atol=1e-5)


def test_weights_say_how_often_documents_come(model_dir: Path, tmp_path: Path, files: Path) -> None:
    one, two = str(files / "00.txt"), str(files / "0[1-4].txt")
    mixed = _data(model_dir, tmp_path, train_files={one: 3, two: 0.5})
    mixed.setup("fit")
    borders = mixed.datasets["train"].pieces[:, 0].tolist()
    assert borders.count(0) == 3
    documents = [mixed.datasets["train"].store.origin(begin) for begin in borders]
    assert len({place["source"] for place in documents}) == 1 + 2


def test_repeat_takes_the_part_of_a_weight_once_more() -> None:
    counts = np.bincount(repeat(np.arange(8), np.full(8, 2.25), seed=0), minlength=8)
    assert sorted(counts) == [2] * 6 + [3] * 2


@pytest.mark.parametrize("settings", [{"val_fraction": 0.1}, {"num_workers": 2}, {"train_files": {"*.txt": 2.0}}])
def test_what_a_stream_cannot_do_is_refused(model_dir: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="streaming=True"):
        _data(model_dir, tmp_path, streaming=True, **settings)


def test_a_stream_says_what_its_files_are_taken_for(
    model_dir: Path, tmp_path: Path, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _data(model_dir, tmp_path, train_files=f"{files}/*.txt", packing=True, streaming=True)
    with caplog.at_level("INFO"):
        data.train_dataloader()
    assert "train: 12 files as plain text -> a stream of packed rows of at most 16 tokens" in caplog.text
