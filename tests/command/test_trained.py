"""Checkpoints and exports are evaluated and spoken to, with the numbers and words of plain transformers."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lightning_automodel.cli import main
from lightning_automodel.command import evaluation, trained
from lightning_automodel.command.text import Sampling, generate
from lightning_automodel.command.trained import devices_needed, opened
from lightning_automodel.finetuning import CausalLM, TextDataModule
from lightning_automodel.testing.pool import Pool
from tests.support.training import make_trainer

TEXT = "The quick brown fox jumps. "
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def checkpoint(model_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint after one step."""
    (tmp_path / "text.txt").write_text(TEXT * 9)
    data = TextDataModule(
        str(model_dir), str(tmp_path / "text.txt"), sequence_length=32, cache_dir=str(tmp_path / "cache")
    )
    module = CausalLM(str(model_dir), optimizer=lambda p: torch.optim.SGD(p, lr=0.5), lr_scheduler=None)
    trainer: L.Trainer = make_trainer({}, max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    return tmp_path / "1.ckpt"


def _expected_answer(directory: Path, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
    answer = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(answer[0, given.shape[1] :], skip_special_tokens=True)


def test_a_checkpoint_and_its_export_are_judged_alike(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    main(["export", str(checkpoint), str(tmp_path / "export")])
    with pytest.raises(SystemExit):
        main(["export", str(checkpoint), str(tmp_path / "export")])
    assert "export is not empty; give another directory, or --overwrite=true" in capsys.readouterr().err
    main(["export", str(checkpoint), str(tmp_path / "export"), "--overwrite=true"])
    found = []
    for model in (checkpoint, tmp_path / "export"):
        given = [f"--files={tmp_path}/text.txt", "--sequence_length=32", f"--output={tmp_path}/numbers.json"]
        main(["evaluate", str(model), *given])
        found.append(json.loads((tmp_path / "numbers.json").read_text()))
    assert found[0] == found[1]
    assert f"loss: {found[0]['loss']:.6g}\n" in capsys.readouterr().out
    assert list((tmp_path / "cache/lightning_automodel/exports").iterdir()) == []

    data = TextDataModule(str(tmp_path / "export"), val_files=str(tmp_path / "text.txt"), sequence_length=32)
    data.setup("validate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    rows = [{key: value[None] for key, value in row.items() if key != "position_ids"} for row in data.datasets["val"]]
    targets = [int((row["labels"][:, 1:] >= 0).sum()) for row in rows]
    with torch.no_grad():
        losses = [float(model(**row).loss) * count for row, count in zip(rows, targets, strict=True)]
    assert found[0]["loss"] == pytest.approx(sum(losses) / sum(targets), rel=1e-5)


def test_a_checkpoint_behind_a_url_is_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with opened(checkpoint.as_uri()) as directory:
        assert AutoModelForCausalLM.from_pretrained(directory).num_parameters() > 0
    assert not Path(directory).exists()


def test_all_processes_of_a_node_fail_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no.ckpt").write_bytes(b"nothing")
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv(trained._FOLDER, str(tmp_path / "export"))
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(Exception) as failed, opened(str(tmp_path / "no.ckpt")):  # noqa: PT011
            pass
        said.append(str(failed.value))
    assert said[0] == said[1] != ""


def test_commands_at_the_same_time_do_not_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one job of SLURM, or with one port set for all, wrote into one folder and read what the other had left."""
    for name in ("LOCAL_RANK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    process = trained.os.getpid()

    def names(checkpoint: str, **variables: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            found = []
            for number in (process, process + 1):
                patch.setattr(trained.os, "getpid", lambda number=number: number)
                found.append(trained._name_of_run(checkpoint))
        return found

    alone, interactive = names("a"), names("a", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1")
    assert alone[0] != alone[1]
    assert interactive[0] != interactive[1]
    steps = [names("a", SLURM_STEP_ID=step, SLURM_STEP_NUM_TASKS="2") for step in "01"]
    elastic = [names(checkpoint, LOCAL_RANK="1") for checkpoint in "ab"]
    assert all(one == other for one, other in (*steps, *elastic))
    assert len({*alone, *(one for one, _ in (*steps, *elastic))}) == 6


def test_an_export_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.ckpt").write_bytes(b"nothing")
    monkeypatch.setenv(trained._FOLDER, str(tmp_path / "export"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(trained, "_LONGEST", 0.5)
    with (
        pytest.raises(ValueError, match="was not exported within 0 minutes by the first"),
        opened(str(tmp_path / "1.ckpt")),
    ):
        pass


def test_what_evaluate_cannot_do_is_one_line(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    for given, message in (([], "needs --files"), (["--tasks=[hellaswag]"], "pip install lm-eval")):
        with pytest.raises(SystemExit, match="1"):
            main(["evaluate", str(model_dir), *given])
        assert message in capsys.readouterr().err


def _answers(directory: str, tp: int, count: int) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        generate(directory, "The quick", tp=tp, sampling=Sampling(max_new_tokens=count))
    return printed.getvalue()


def test_a_split_model_says_what_a_whole_one_says(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, pool2: Pool
) -> None:
    expected = _expected_answer(model_dir, tokenizer, "The quick", 12)
    assert _answers(str(model_dir), 1, 12).strip("\n") == expected.strip("\n")
    first, second = pool2.run(_answers, str(model_dir), 2, 12, trainer=True)
    assert first.strip("\n") == expected.strip("\n")
    assert second == ""


def test_the_likeliest_token_is_taken_where_the_model_says_beams(
    model_dir: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """transformers streams no beams, and said so in an error of its own."""
    expected = _expected_answer(model_dir, tokenizer, "The quick", 5)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.generation_config is not None
    model.generation_config.num_beams = 3
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    assert _answers(str(tmp_path), 1, 5).strip("\n") == expected.strip("\n")


def test_a_conversation_remembers(
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n"))
    main(["generate", str(model_dir), f"--tokenizer={tmp_path}", "--system=be kind", "--sampling.max_new_tokens=4"])
    begin = "system: be kind\nuser: the fox\n"
    first = _expected_answer(model_dir, tokenizer, f"{begin}a:", 4)
    second = _expected_answer(model_dir, tokenizer, f"{begin}assistant: {first}\nuser: the dog\na:", 4)
    assert capsys.readouterr().out == f"{first}\n{second}\n"


@pytest.mark.parametrize(
    ("weights", "memory", "count", "tp"), [(100, None, 0, 1), (70, 100, 8, 1), (90, 100, 8, 2), (900, 100, 8, 8)]
)
def test_a_model_is_split_as_its_weights_need(weights: int, memory: int | None, count: int, tp: int) -> None:
    assert devices_needed(weights, memory, count) == tp
