"""Judges a model: loss and perplexity of held-out text, and tasks of the lm-evaluation-harness."""

import json
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_automodel.command.trained import make_trainer, opened
from lightning_automodel.config.proposals import proposal
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.data import TextDataModule
from lightning_automodel.finetuning.image_text import ImageTextDataModule, ImageTextLM, is_image_text
from lightning_automodel.finetuning.pretrained import TOKENIZER, Pretrained
from lightning_automodel.finetuning.sources import Record, find_sources
from lightning_automodel.finetuning.trust import trusts
from lightning_automodel.pages import check_folder


def evaluate(
    model: str,
    files: list[str] | str | None = None,
    tasks: list[str] | None = None,
    output: str | None = None,
    tokenizer: str | None = None,
    sequence_length: int = 1024,
    batch_size: int = 1,
    columns: dict[str, str] | None = None,
    limit: int | None = None,
    tp: int | None = None,
    devices: int | None = None,
    precision: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
) -> None:
    """Judges a checkpoint, an export or a model of the hub by held-out text, or by tasks of the lm-evaluation-harness.

    Args:
        model: checkpoint, directory that save_pretrained or export wrote (of an adapter, too), or name on the hub.
        files: held-out text, or chats with images, in the forms that training takes; loss and perplexity are over all
            target tokens.
        tasks: of the lm-evaluation-harness, where that is installed: names, or YAML files; on one process.
        output: file of JSON that gets the numbers, too.
        tokenizer: directory or name, of the processor of a model that reads images; by default the model's.
        sequence_length: tokens of a row, at most; longer documents are split.
        batch_size: rows at a time.
        columns: what the keys of a record are called in the files.
        limit: examples of each task; by default all.
        tp: ranks among which the model is split; by default as many as its weights need.
        devices: processes; by default one replica of the model.
        precision: of the trainer; by default bf16-true on CUDA, else 32-true.
        model_kwargs: more arguments of from_pretrained, as in training: --model_kwargs.trust_remote_code=true.

    Raises:
        ValueError: for files and tasks both, or none, and for what cannot be read, written or split so.
    """
    if (files is None) == (tasks is None):
        raise ValueError(
            "evaluate needs --files (held-out text) or --tasks (of the lm-evaluation-harness), one of them"
        )
    if tasks is None:
        _refuse("--files", limit=limit)
    else:
        _refuse("--tasks", columns=columns, tp=tp, devices=devices, precision=precision)
    if output is not None:
        check_folder("--output", Path(output).parent)
    sources = [] if files is None else find_sources(files)
    with opened(model, trusts=trusts(model_kwargs)) as source:
        if tasks is not None:
            numbers = _run_tasks(Pretrained.of(source), model_kwargs, tasks, tokenizer, batch_size, limit)
        else:
            rows = {"sequence_length": sequence_length, "batch_size": batch_size, "val_files": files}
            records = (record for each in sources for record in each.read(columns))
            module, data = _subject(source, model_kwargs, records, columns, tokenizer, rows)
            trainer = make_trainer(module.model_name, tp, devices, precision)
            (logged,) = trainer.validate(module, data, verbose=False)
            if not trainer.is_global_zero:
                return
            count = len(data.datasets["val"])
            numbers = {"loss": logged["val/loss"], "perplexity": logged["val/perplexity"], "rows": count}
    _tell(numbers, output)


def _subject(
    source: str,
    model_kwargs: dict[str, Any] | None,
    records: Iterable[Record],
    columns: dict[str, str] | None,
    tokenizer: str | None,
    rows: Mapping[str, Any],
) -> tuple[CausalLM, Any]:
    """Make the module that trains such a model, and the data module that reads such files."""
    config, _ = Pretrained.of(source).find_config(model_kwargs or {})
    trust = {"trust_remote_code": trusts(model_kwargs)}
    if not is_image_text(config, records):
        data: Any = TextDataModule(tokenizer, columns=columns, tokenizer_kwargs=trust, **rows)
        return CausalLM(source, model_kwargs=model_kwargs), data
    _refuse("models that read images", columns=columns)
    data = ImageTextDataModule(tokenizer, processor_kwargs=trust, **rows)
    return ImageTextLM(source, model_kwargs=model_kwargs), data


def _refuse(what: str, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"--{name} does nothing with {what}; leave it out")


def _run_tasks(
    source: Pretrained,
    model_kwargs: dict[str, Any] | None,
    tasks: list[str],
    tokenizer: str | None,
    batch_size: int,
    limit: int | None,
) -> dict[str, Any]:
    if find_spec("lm_eval") is None:
        raise ValueError("--tasks needs the lm-evaluation-harness, which is not installed; pip install lm-eval")
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            hint = proposal(task, manager.all_tasks)
            raise ValueError(f"--tasks: the lm-evaluation-harness has no task {task!r}, nor is that a file{hint}")
    adapter = {} if source.adapter is None else {"peft": source.adapter}
    named = {"pretrained": source.model, "tokenizer": tokenizer or source.holder_of(TOKENIZER), **adapter}
    arguments = {**(model_kwargs or {}), **named}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(tasks),
        task_manager=manager,
        batch_size=batch_size,
        limit=limit,
        device=device,
    )
    return found["results"]


def _tell(numbers: dict[str, Any], output: str | None) -> None:
    for name, value in numbers.items():
        sys.stdout.write(f"{name}: {value:.6g}\n" if isinstance(value, float) else f"{name}: {value}\n")
    if output is not None:
        Path(output).write_text(json.dumps(numbers, indent=1, default=str) + "\n")
