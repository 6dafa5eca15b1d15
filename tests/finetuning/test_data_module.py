"""The data module: splits, caching, order of batches, refusals."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import LlamaConfig

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import TextDataModule
from lightning_automodel.finetuning.data import token_rows
from lightning_automodel.finetuning.encoding import Encoder
from lightning_automodel.testing.pool import Pool


@pytest.fixture
def files(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index:02}.txt").write_text(f"document {index} says " + "fox " * (index + 1))
    return f"{folder}/*.txt"


@pytest.fixture
def make(model_dir: Path, tmp_path: Path, files: str) -> Any:
    """Builds a data module over ``files`` with its cache in ``tmp_path``."""
    settings = {
        "tokenizer": str(model_dir),
        "train_files": files,
        "sequence_length": 32,
        "cache_dir": str(tmp_path / "cache"),
    }
    return lambda **changes: TextDataModule(**(settings | changes))


def _rows(loader: Any) -> list[list[int]]:
    return [row for batch in loader for row in batch["input_ids"].tolist()]


def test_held_out_documents_are_the_same_each_time_and_not_trained_on(make: Any) -> None:
    first, second = make(val_fraction=0.2), make(val_fraction=0.2)
    for data in (first, second):
        data.setup("fit")
    assert _rows(first.val_dataloader()) == _rows(second.val_dataloader())
    train, val = (first.datasets[split].pieces.tolist() for split in ("train", "val"))
    assert len(first.datasets["val"]) >= 4
    assert not {tuple(piece) for piece in train} & {tuple(piece) for piece in val}
    other = make(val_fraction=0.2, split_seed=1)
    other.setup("validate")
    assert other.datasets["val"].pieces.tolist() != val


def test_tokens_are_computed_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make().prepare_data()
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenized again"))
    data = make(sequence_length=16, packing=True)
    data.setup("fit")
    assert len(_rows(data.train_dataloader())) > 0


def test_the_cache_follows_files_and_switches(make: Any, files: str) -> None:
    make().prepare_data()
    cache = make().cache_dir
    make(append_eos=False).prepare_data()
    assert len(list(cache.iterdir())) == 2
    other = make(tokenizer_kwargs={"eos_token": "<|im_end|>"})
    other.setup("fit")
    assert len(list(cache.iterdir())) == 3
    assert "<|im_end|>" in other.loaded_tokenizer.batch_decode([other.datasets["train"][0]["input_ids"]])[0]
    (Path(files).parent / "00.txt").write_text("something else")
    data = make()
    data.setup("fit")
    assert len(list(cache.iterdir())) == 4
    assert "something else<eos>" in data.loaded_tokenizer.batch_decode([data.datasets["train"][0]["input_ids"]])


def test_workers_get_the_directory_not_the_tokens(make: Any) -> None:
    data = make()
    data.setup("fit")
    dataset = data.datasets["train"]
    store = pickle.loads(pickle.dumps(dataset.store))
    assert len(pickle.dumps(dataset.store)) < 1000
    assert (store.ids == dataset.store.ids).all()


def test_prediction_never_packs(make: Any, files: str) -> None:
    data = make(packing=True, predict_files=files, sequence_length=64)
    data.setup("predict")
    (batch,) = [b for i, b in enumerate(data.predict_dataloader()) if i == 0]
    assert "attention_mask" in batch
    assert len(data.datasets["predict"]) == 20


def _epochs(settings: dict[str, Any]) -> list[list[list[int]]]:
    """The rows that this rank trains on, by epoch."""

    class Recorder(L.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.rows: list[list[list[int]]] = []

        def on_train_epoch_start(self) -> None:
            self.rows.append([])

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.rows[-1] += batch["input_ids"].tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Recorder()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=FSDP2TPStrategy(), max_epochs=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, TextDataModule(**settings))
    return module.rows


def test_every_epoch_shuffles_anew_and_data_ranks_share_the_rows(make: Any, files: str, pool2: Pool) -> None:
    data = make()
    settings = {
        "tokenizer": data.tokenizer,
        "train_files": files,
        "sequence_length": 32,
        "cache_dir": str(data.cache_dir),
    }
    runs = [pool2.run(_epochs, settings, trainer=True) for _ in range(2)]
    assert runs[0] == runs[1]
    first, second = runs[0]
    assert first[0] != first[1]
    data.setup("fit")
    for epoch in range(2):
        # What does not fill a round of all ranks is left out, so that all take the same number of steps.
        rows = sorted(tuple(row) for row in _rows(data.train_dataloader()))
        seen = sorted(tuple(row) for row in first[epoch] + second[epoch])
        assert not Counter(seen) - Counter(rows)
        assert len(seen) == len(rows) - len(rows) % 2
        assert len(first[epoch]) == len(second[epoch])


def test_one_process_shuffles_anew_each_epoch_whatever_was_drawn_before(make: Any) -> None:
    data = make()
    data.setup("fit")
    loader = data.train_dataloader()
    first = _rows(loader)
    torch.rand(3)
    assert _rows(data.train_dataloader()) == first
    loader.sampler.set_epoch(1)
    assert _rows(loader) != first
    assert sorted(_rows(loader)) == sorted(first)


def test_the_loader_goes_on_where_its_state_says(make: Any) -> None:
    data = make()
    data.setup("fit")
    loader = data.train_dataloader()
    rows = _rows(loader)
    assert loader.state_dict() == {"batches": 0}
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed = data.train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    assert _rows(resumed) == rows[5:]
    assert _rows(resumed) == rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 1}, "sequence_length=1: a row needs 2 tokens"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be at least 1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0 must be at least 0 and less than 1"),
        ({"val_fraction": 0.1, "val_files": "x"}, "give one of them"),
    ],
)
def test_impossible_sizes_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_missing_and_empty_data_are_refused(make: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    lone = tmp_path / "lone.txt"
    lone.write_text("only one")
    with pytest.raises(ValueError, match="cannot fit; give train_files"):
        make(train_files=None).setup("fit")
    with pytest.raises(ValueError, match="holds no text: 1 files, 1 documents, 0 tokens"):
        make(train_files=str(empty), append_eos=False).setup("fit")
    with pytest.raises(ValueError, match="leaves none to train on"):
        make(train_files=str(lone), val_fraction=0.5).setup("fit")
    with pytest.raises(ValueError, match="has no test data; give test_files"):
        make().test_dataloader()
    with pytest.raises(ValueError, match="give tokenizer="):
        make(tokenizer=None).setup("fit")
    LlamaConfig().save_pretrained(tmp_path / "without")
    with pytest.raises(ValueError, match=r"no tokenizer can be read from '.*without' \(.*\); give tokenizer="):
        make(tokenizer=str(tmp_path / "without")).setup("fit")


def test_bad_input_fails_in_setup_where_every_rank_sees_it(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("{}\n")
    data = make(train_files=str(file))
    data.prepare_data()
    with pytest.raises(ValueError, match=r"bad.jsonl:1: keys"):
        data.setup("fit")


def test_rows_are_plain_lists(make: Any) -> None:
    data = make(packing=True, val_fraction=0.5)
    data.setup("validate")
    rows = token_rows(data.val_dataloader())
    assert len(rows) == len(data.datasets["val"])
    assert all(set(row) == {"input_ids", "labels", "position_ids"} and len(row["labels"]) == 32 for row in rows)
    assert isinstance(rows[0]["labels"][0], int)
    assert torch.tensor(rows[0]["input_ids"]).dtype == torch.int64
