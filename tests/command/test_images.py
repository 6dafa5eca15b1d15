"""Models that read images are judged and asked by the command, with the numbers and words of plain transformers."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightning_automodel.cli import main
from lightning_automodel.command.text import Sampling, generate
from lightning_automodel.finetuning import ImageTextDataModule
from lightning_automodel.finetuning.image_text import is_image_text
from lightning_automodel.finetuning.sources import PromptRecord, find_sources
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_config


@pytest.fixture
def folder(vision_dir: Path) -> Path:
    return vision_dir


def asked(directory: str, tp: int, **given: Any) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        generate(directory, "What color?", tp=tp, sampling=Sampling(max_new_tokens=6), **given)
    return printed.getvalue()


def expected_answer(folder: Path, *images: Path, system: str | None = None) -> str:
    """By plain transformers."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    processor = AutoProcessor.from_pretrained(folder / "model")
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "What color?"}]
    messages = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    text = processor.apply_chat_template([*messages, {"role": "user", "content": content}], add_generation_prompt=True)
    pictures = [Image.open(path).convert("RGB") for path in images] or None
    given = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**given, max_new_tokens=6, do_sample=False)
    return processor.tokenizer.decode(answer[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_is_seen_is_answered(folder: Path, count: int, pool2: Pool) -> None:
    images = sorted((folder / "data").glob("*.png"))[:count]
    expected = expected_answer(folder, *images).strip("\n")
    paths = [str(path) for path in images]
    assert asked(str(folder / "model"), 1, image=paths).strip("\n") == expected
    first, second = pool2.run(asked, str(folder / "model"), 2, image=paths, trainer=True)
    assert first.strip("\n") == expected
    assert second == ""


def test_an_instruction_stands_before(folder: Path) -> None:
    image = min((folder / "data").glob("*.png"))
    said = asked(str(folder / "model"), 1, image=str(image), system="Be brief.")
    assert said.strip("\n") == expected_answer(folder, image, system="Be brief.").strip("\n")


def test_held_out_chats_are_judged(folder: Path, tmp_path: Path) -> None:
    output, files = tmp_path / "numbers.json", folder / "data" / "chats.jsonl"
    main(["evaluate", str(folder / "model"), f"--files={files}", f"--output={output}", "--batch_size=2"])
    found = json.loads(output.read_text())
    data = ImageTextDataModule(str(folder / "model"), val_files=str(files))
    data.setup("validate")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    losses, counts = [], []
    for batch in data.val_dataloader():
        counts.append(int((batch["labels"][:, 1:] >= 0).sum()))
        with torch.no_grad():
            losses.append(float(model(**batch).loss) * counts[-1])
    assert found["rows"] == 8
    assert found["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)


def test_a_model_for_both_reads_images_where_there_are_some(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    paths = (folder / "data" / "chats.jsonl", tmp_path / "words.jsonl")
    shown, words = ([record for each in find_sources(str(path)) for record in each.read()] for path in paths)
    assert [is_image_text(tiny_config("gemma3"), records) for records in (shown, words, [])] == [True, False, False]
    assert is_image_text(tiny_config("llava"), words)
    assert not is_image_text(tiny_config("gemma3"), [PromptRecord("here", "a", "b")])
    assert not is_image_text(tiny_config("llama"), shown)


def test_what_cannot_be_shown_is_one_line(folder: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = min((folder / "data").glob("*.png"))
    for command, said in (
        (["generate", str(folder / "model"), "--prompt=a", "--image=none.png"], "image='none.png' is no file"),
        (
            ["generate", str(model_dir), "--prompt=a", f"--image={image}"],
            "is none that AutoModelForImageTextToText loads",
        ),
        (
            ["evaluate", str(folder / "model"), f"--files={folder}/data/chats.jsonl", "--columns={'a': 'b'}"],
            "--columns does nothing with models that read images",
        ),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert said in capsys.readouterr().err
