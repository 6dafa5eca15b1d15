"""Chats with images: what is trained on, what is refused, and the numbers of one process under tensor parallelism."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoProcessor

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.cli import main
from lightning_automodel.finetuning import ImageTextDataModule, ImageTextLM, image_text
from lightning_automodel.finetuning.image_text import ChatCollator
from lightning_automodel.finetuning.sources import ChatRecord
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import make_trainer, whole_parameters, world_size


@pytest.fixture
def folder(vision_dir: Path) -> Path:
    return vision_dir


def _data(folder: Path, **settings: Any) -> ImageTextDataModule:
    data = ImageTextDataModule(str(folder / "model"), str(folder / "data" / "*.jsonl"), batch_size=2, **settings)
    data.setup("fit")
    return data


def test_only_the_answer_is_trained_on(folder: Path) -> None:
    batch = next(iter(_data(folder, pad_to_multiple_of=8).train_dataloader()))
    processor = AutoProcessor.from_pretrained(folder / "model")
    assert batch["input_ids"].shape[1] % 8 == 0
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert int((ids == processor.image_token_id).sum()) == 4
        answer = processor.tokenizer.decode(labels[labels >= 0])
        assert answer in {f"{color}<eos>\n" for color in ("red", "green", "blue", "white")}
        assert torch.equal(ids[labels >= 0], labels[labels >= 0])


def test_images_are_of_the_size_that_is_asked_for(folder: Path) -> None:
    sizes = {"size": {"height": 8, "width": 8}, "crop_size": {"height": 8, "width": 8}}
    batch = next(iter(_data(folder, processor_kwargs=sizes).train_dataloader()))
    assert batch["pixel_values"].shape == (2, 3, 8, 8)


def _message(role: str, text: str, *images: Path) -> dict[str, Any]:
    shown = [{"type": "image", "image": str(image)} for image in images]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}


@pytest.mark.parametrize(("later", "times"), [(0, 1), (1, 3)])
def test_images_are_prepared_once_unless_more_follow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, later: int, times: int
) -> None:
    images = sorted((folder / "data").rglob("*.png"))[:2]
    said = ["red", "a green one", "blue"]
    asked = [_message("user", "?", *shown) for shown in (images[:1], images[1 : 1 + later], [])]
    messages = [m for ask, answer in zip(asked, said, strict=True) for m in (ask, _message("assistant", answer))]
    processor = AutoProcessor.from_pretrained(folder / "model")
    calls, process = [], image_text.process
    monkeypatch.setattr(image_text, "process", lambda *a, **k: calls.append(1) or process(*a, **k))
    found = ChatCollator(processor, 256)([ChatRecord("here", messages, None)])["labels"]
    assert len(calls) == times
    monkeypatch.setattr(ChatCollator, "_words", lambda _, messages, **k: [len(messages)])  # by the processor itself
    assert torch.equal(ChatCollator(processor, 256)([ChatRecord("here", messages, None)])["labels"], found)
    words = processor.tokenizer.decode(found[found >= 0])
    assert words == "".join(f"{answer}<eos>\n" for answer in said)


def _fit(folder: str, tp: int) -> list[torch.Tensor]:
    L.seed_everything(5)
    module = ImageTextLM(f"{folder}/model", lambda parameters: torch.optim.SGD(parameters, lr=0.5), lr_scheduler=None)
    strategy = FSDP2TPStrategy(tp=tp, config=FSDP2Config(backend="gloo"))
    windows = 2 * tp // world_size()  # two batches of two rows in a step
    trainer = make_trainer(strategy, max_steps=2, accumulate_grad_batches=windows, gradient_clip_val=1.0)
    trainer.fit(module, _data(Path(folder)))
    return list(whole_parameters(module).values())


@pytest.mark.parametrize("tp", with_long([1, 2], 1))
def test_two_processes_train_as_one_does(folder: Path, pool2: Pool, tp: int) -> None:
    untrained = ImageTextLM(str(folder / "model"))
    untrained.configure_model()
    alone = _fit(str(folder), 1)
    assert max((one - other).abs().max() for one, other in zip(alone, untrained.parameters(), strict=True)) > 1e-3
    (found, _) = pool2.run(_fit, str(folder), tp, trainer=True)
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _save(folder: str, path: Path) -> None:
    module = ImageTextLM(f"{folder}/model", lr_scheduler=None)
    trainer = make_trainer(FSDP2TPStrategy(config=FSDP2Config(backend="gloo")), max_steps=1)
    trainer.fit(module, _data(Path(folder)))
    trainer.save_checkpoint(path)


@pytest.mark.slow
def test_an_export_holds_the_processor(folder: Path, tmp_path: Path, nursery: Nursery) -> None:
    Pool(nursery, 1).run(_save, str(folder), tmp_path / "one.ckpt", trainer=True)
    main(["export", str(tmp_path / "one.ckpt"), str(tmp_path / "export")])
    found, own = (AutoProcessor.from_pretrained(path) for path in (tmp_path / "export", folder / "model"))
    assert type(found) is type(own)
    assert found.image_processor.size == own.image_processor.size
    assert found.tokenizer.get_vocab() == own.tokenizer.get_vocab()


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chats.jsonl:\d: \d+ tokens, more than sequence_length=8"):
        list(_data(folder, sequence_length=8).train_dataloader())
    content = [{"type": "image", "image": "none.png"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(ValueError, match=r"data.jsonl:1: the image 'none.png' is not in"):
        ImageTextDataModule(train_files=str(tmp_path / "data.jsonl")).setup("fit")
    (tmp_path / "data.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=r"data.jsonl:1: chats with images are records"):
        ImageTextDataModule(train_files=str(tmp_path / "data.jsonl")).setup("fit")
