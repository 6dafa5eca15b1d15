"""When memory runs out there is a report: planned beside measured, and what would help most."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from lightning_automodel import FSDP2Config
from lightning_automodel.callbacks import MemoryProfiler, levers, memory
from lightning_automodel.callbacks.levers import Answer, Lever, Question, answer, ask, variants
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner import HARDWARE, Run
from lightning_automodel.planner.plan import build
from lightning_automodel.testing.pool import Pool
from tests.callbacks.support import Dicts, train
from tests.support.families import tiny_config
from tests.support.training import LENGTH, tiny_llama


class Full(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def run_out(directory: Path) -> str:
    """Rank 0's report, with the planner's answer to a question that is noted, and not computed."""
    asked: list[Question] = []

    def note(question: Question, seconds: float) -> Answer:
        asked.append(question)
        three = [Lever("chunked_loss=1024", 2**28, 0.9), Lever("tp=4", 2**29, 0.5), Lever("cp=2", 2**30, 0.4)]
        return Answer("backward", {"parameters": 2**29, "activations": 2**30}, [*three, Lever("never", 2**31, 1.0)])

    memory.ask = note  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train({"tp": 2}, 1, [MemoryProfiler(dirpath=directory), Full()], accumulate_grad_batches=2)
    for question in asked:
        assert (question.run.micro_batch, question.run.sequence_length, question.run.accumulation) == (4, LENGTH, 2)
        assert question.run.sizes.tp == 2
    return next(
        path.read_text() for path in directory.glob("out-of-memory-rank-*.txt") if "planned:" in path.read_text()
    )


def test_a_report_and_the_error(pool2: Pool) -> None:
    text = pool2.run(run_out, trainer=True, with_directory=True, timeout=110)[0]
    lines = text.splitlines()
    assert lines[0].endswith("ran out of memory after 0 optimizer steps")
    table = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert table["parameters"][:2] == ["0.50", "GiB"]
    assert float(table["parameters"][2]) > 0  # MiB of what this rank really holds
    assert float(table["gradients"][0]) > 0
    assert table["all"] == ["1.50", "GiB"]
    assert [line.split()[0] for line in lines[-3:]] == ["chunked_loss=1024", "tp=4", "cp=2"]


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train("auto", 1, [MemoryProfiler(dirpath=tmp_path), Full()])
    text = (tmp_path / "out-of-memory-rank-0.txt").read_text()
    assert "not planned: the planner knows FSDP2TPStrategy, and this is SingleDeviceStrategy" in text
    assert "measured" in text


class OfItsOwn(Dicts):
    """Trains adapters around a class that no other process can import."""

    def configure_model(self) -> None:
        class Model(LlamaForCausalLM):
            pass

        if self.model is None:
            self.model = get_peft_model(Model(tiny_llama().config), LoraConfig(target_modules=["q_proj"]))


def run_out_with_a_class_of_its_own(directory: Path) -> str:
    """Runs on each rank: a planner that fails does not hide what has run out."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train({"tp": 2}, 1, [MemoryProfiler(dirpath=directory), Full()], module=OfItsOwn())
    return (directory / f"out-of-memory-rank-{torch.distributed.get_rank()}.txt").read_text()


def test_a_planner_that_fails_leaves_the_report_and_the_error(pool2: Pool) -> None:
    texts = pool2.run(run_out_with_a_class_of_its_own, trainer=True, with_directory=True, timeout=110)
    assert any("not planned: Can't pickle" in text for text in texts)
    assert all("measured" in text for text in texts)


QUESTION = Question(
    build(tiny_config("llama", vocab_size=1024), {"target_modules": "all-linear"}),
    Run(sizes=resolve_sizes(4, tp=2), config=FSDP2Config(), sequence_length=256, micro_batch=2),
    HARDWARE["h100"],
)


@pytest.mark.slow
def test_the_levers_of_a_run() -> None:
    names = [name for name, _ in variants(QUESTION.run)]
    assert names[:3] == ["activation_checkpointing=True", "chunked_loss=1024", "reshard_after_forward=True"]
    assert "sequence_parallel=True" in names
    assert "batch_size=1, accumulate_grad_batches=2" in names
    assert "tp=4" in names
    few = [("activation_checkpointing=True", dict(variants(QUESTION.run))["activation_checkpointing=True"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levers, "variants", lambda run: few)
        found = answer(QUESTION)
    assert [lever.name for lever in found.levers] == ["activation_checkpointing=True"]
    assert found.levers[0].peak < found.peak
    assert 0.3 < found.levers[0].speed < 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_another_process_answers() -> None:
    found = ask(QUESTION, 380)
    assert len(found.levers) >= 3
    assert found.levers == sorted(found.levers, key=lambda lever: lever.peak)


def test_a_planner_that_fails_is_a_sentence() -> None:
    def slow(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("plan", timeout)

    with pytest.raises(ValueError, match="more than 3 s"):
        ask(QUESTION, 3, run=slow)
    failed = subprocess.CompletedProcess("plan", 1, b"", b"Traceback\nValueError: tp=3 does not divide\n")
    with pytest.raises(ValueError, match="ValueError: tp=3 does not divide"):
        ask(QUESTION, 3, run=lambda *_, **__: failed)
