"""Judges a model directory with transformers alone: python -m examples.held_out_loss rows.json model_dir [...].

Prints one JSON object per directory: ``{"model": ..., "loss": ..., "sample": ...}``, the loss per target token over the
rows. Nothing of lightning_automodel is imported, so what it prints is what any user of the export would see.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS_AT_ONCE = 8
PROMPT = "def main():\n"


@torch.no_grad()
def mean_loss(model: Any, rows: list[dict[str, list[int]]]) -> float:
    """Loss per target token; rows hold ``input_ids``, ``labels``, ``position_ids`` of one length."""
    total, targets = 0.0, 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[start : start + ROWS_AT_ONCE]
        batch = {key: torch.tensor([row[key] for row in chunk]) for key in chunk[0]}
        total += float(model(**batch, use_cache=False, num_items_in_batch=1).loss)
        targets += int((batch["labels"][:, 1:] != -100).sum())
    return total / targets


@torch.no_grad()
def continuation(model: Any, directory: str) -> str:
    """What the model writes after ``PROMPT``."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    ids = model.generate(**prompt, max_new_tokens=48, do_sample=True, top_k=20)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def main() -> None:
    """Prints the judgement of each directory."""
    rows_path, *directories = sys.argv[1:]
    with open(rows_path) as file:
        rows = json.load(file)
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        sample = continuation(model, directory)
        print(json.dumps({"model": directory, "loss": mean_loss(model, rows), "sample": sample}), flush=True)


if __name__ == "__main__":
    main()
