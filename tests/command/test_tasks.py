"""Tasks of the lm-evaluation-harness, where that is installed: a local one, with the accuracy of plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_automodel.cli import main

CHOICES = (" fox", " dog", " jumps")
QUESTIONS = ("The quick brown", "The lazy", "The brown fox", "A dog", "quick")
TASK = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["fox", "dog", "jumps"]
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def likeliest(model_dir: Path, question: str) -> int:
    """The place of the choice to which the model gives the largest probability."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    scores = []
    for choice in CHOICES:
        given = len(tokenizer(question)["input_ids"])
        ids = torch.tensor([tokenizer(question + choice)["input_ids"]])
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)
        scores.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(given, ids.shape[1])))
    return scores.index(max(scores))


def test_a_local_task(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    best = [likeliest(model_dir, question) for question in QUESTIONS]
    labels = [*best[:-2], *((place + 1) % len(CHOICES) for place in best[-2:])]  # two that the model gets wrong
    lines = [json.dumps({"question": q, "label": n}) for q, n in zip(QUESTIONS, labels, strict=True)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "animals.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    main(["evaluate", str(model_dir), f"--tasks=[{tmp_path}/animals.yaml]", f"--output={tmp_path}/numbers.json"])
    assert json.loads((tmp_path / "numbers.json").read_text())["animals"]["acc,none"] == pytest.approx(3 / 5)


def test_an_unknown_task_is_one_line(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(SystemExit, match="1"):
        main(["evaluate", str(model_dir), "--tasks=[helaswag]"])
    assert "has no task 'helaswag', nor is that a file; did you mean hellaswag?" in capsys.readouterr().err
