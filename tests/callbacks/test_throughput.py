"""Tokens count once in every layout, after a resume too, and nothing waits between two logs."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.profiler import ProfilerActivity, profile

from lightning_automodel.callbacks import Health, Throughput, TQDMStepBar
from lightning_automodel.callbacks.documents import count_documents, documents_of
from lightning_automodel.callbacks.sample import measure
from lightning_automodel.callbacks.steps import seconds_left
from lightning_automodel.planner.flops import count_model, whole_twin
from lightning_automodel.planner.hardware import HARDWARE, hardware_of
from lightning_automodel.testing.pool import Pool
from tests.callbacks.support import GLOBAL_BATCH, ROWS, lengths, logged, saver, train
from tests.support.marks import with_long
from tests.support.training import tiny_llama

PEAK = 1e9


def speeds(sizes: dict[str, Any], data_size: int, accumulate: int) -> dict[str, Any]:
    callback = Throughput(peak=PEAK)
    _, _, memory = train(sizes, data_size, [callback], accumulate_grad_batches=accumulate, max_epochs=2)
    names = memory.logged[-1]
    series = {name.removeprefix("train/"): logged(memory, name.removeprefix("train/")) for name in names}
    return {"total": (callback.tokens, callback.samples), **series}


@pytest.mark.parametrize(("sizes", "data_size"), with_long([({"tp": 2}, 1), ({"dp_shard": 2}, 2)], ({"tp": 2}, 1)))
def test_tokens_count_once(pool2: Pool, sizes: dict[str, int], data_size: int) -> None:
    steps = 4  # two micro-batches each, of two epochs
    every = lengths()
    seen = [sum(every[:8]), sum(every), sum(every) + sum(every[:8]), 2 * sum(every)]
    flops = count_model(whole_twin(tiny_llama()))
    for found in pool2.run(speeds, sizes, data_size, 2, trainer=True, timeout=110):
        assert found["total"] == (2 * sum(every), 2 * ROWS)
        assert found["tokens_seen"] == seen
        assert found["eta_seconds"][-1] == 0
        assert len(found["eta_seconds"]) == steps
        halves = [every[:8], every[8:]] * 2
        for i in range(steps):
            seconds = found["seconds_per_step"][i]
            assert found["tokens_per_second"][i] * seconds == pytest.approx(sum(halves[i]), rel=1e-4)
            assert found["tokens_per_second_per_device"][i] == pytest.approx(found["tokens_per_second"][i] / 2)
            work = flops.of_documents(halves[i]) / 2 / 1e12
            assert found["tflops_per_device"][i] * seconds == pytest.approx(work, rel=1e-4)
            assert found["mfu"][i] == pytest.approx(found["tflops_per_device"][i] * 1e12 / PEAK, rel=1e-4)
            parts = ("data", "forward_backward", "optimizer", "other")
            assert sum(found[f"seconds_{part}"][i] for part in parts) <= seconds * 1.01
        assert found["peak_memory_gib"][-1] > 0


def test_the_end_may_be_that_of_a_timer() -> None:
    timers = [Timer(), Timer({"seconds": 40}), Timer({"hours": 2})]
    trainer: Any = SimpleNamespace(callbacks=[*timers, Throughput()])
    for timer in timers:
        timer.on_train_start(trainer, Mock())
    assert 30 < seconds_left(trainer) <= 40
    trainer.callbacks = timers[:1]
    assert seconds_left(trainer) == float("inf")


class Stop(Callback):
    """Ends a run that only its time bounds."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


def test_a_run_that_only_its_time_ends() -> None:
    callback = Throughput()
    trainer = Trainer(
        max_time={"minutes": 50},
        max_epochs=-1,
        callbacks=[callback, Stop()],
        log_every_n_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert 2900 < callback.logged["eta_seconds"] <= 3000


def resumed(directory: Path) -> list[tuple[int, int, list[float]]]:
    """A whole run; one that ends within an epoch; what goes on from it in another layout."""
    results = []
    for sizes, data_size, steps, path in (
        ({"dp_shard": 2}, 2, 7, None),
        ({"tp": 2}, 1, 3, None),
        ({"dp_shard": 2}, 2, 7, directory / "step=3.ckpt"),
    ):
        callback = Throughput()
        arguments = {"max_epochs": -1, "max_steps": steps, "ckpt_path": path, "enable_checkpointing": True}
        _, _, memory = train(sizes, data_size, [callback, saver(directory, 3)], **arguments)
        results.append((callback.tokens, callback.samples, logged(memory, "tokens_seen")))
    return results


@pytest.mark.slow
def test_a_resumed_run_goes_on_counting(pool2: Pool) -> None:
    whole, first, second = pool2.run(resumed, trainer=True, with_directory=True, timeout=110)[0]
    assert whole[:2] == second[:2]
    assert whole[1] == 7 * GLOBAL_BATCH
    assert whole[2] == [*first[2], *second[2]]


def waits(callbacks: bool, every: int) -> Counter[str]:
    """Collectives of this rank, and values that the host has read, during a run."""
    shown = [Throughput(), Health(), TQDMStepBar()] if callbacks else []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train({"dp_shard": 2}, 2, shown, log_every_n_steps=every, enable_progress_bar=True)
    names = ("aten::_local_scalar_dense", "aten::item", "c10d::", "_c10d_functional::")
    return Counter({e.key: e.count for e in profiler.key_averages() if e.key.startswith(names)})


def compare_waits() -> tuple[Counter[str], Counter[str], Counter[str]]:
    return waits(False, 1000), waits(True, 1000), waits(True, 2)


@pytest.mark.slow
def test_nothing_waits_between_two_logs(pool2: Pool) -> None:
    without, between, often = pool2.run(compare_waits, trainer=True, timeout=115)[0]
    # The folder of the bar's and the callbacks' own start and end: one sum of what is left.
    more = between - without
    assert set(more) <= {"c10d::allreduce_"}
    assert more.total() <= 1
    assert (often - between)["c10d::allreduce_"] >= 2 * 2  # two logs, each with a sum and a maximum


def sampled() -> list[float]:
    callback = Throughput(sample_every_n_steps=2)
    _, _, memory = train({"dp_shard": 2}, 2, [callback])
    return logged(memory, "seconds_waiting")


@pytest.mark.long
def test_a_sampled_step_says_what_it_waited(pool2: Pool) -> None:
    found = pool2.run(sampled, trainer=True, timeout=110)[0]
    assert len(found) == 3  # from the second step on
    assert all(0 < seconds < 10 for seconds in found)


class Event:
    def __init__(self, name: str, start: float, end: float, on_device: bool = False, is_range: bool = False) -> None:
        self.name, self.is_user_annotation = name, is_range
        self.device_type = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
        self.time_range = type("Range", (), {"start": start, "end": end})


def test_waiting_is_what_nothing_hides() -> None:
    work = [Event("aten::mm", 0, 5), Event("aten::add", 8, 9), Event("c10d::allreduce_", 5, 12)]
    sample = measure([*work, Event("gloo:all_reduce", 4, 7), Event("gloo:all_gather", 6, 10)])
    assert sample.waited == pytest.approx((3 + 1) / 1e6)
    assert sample.all == pytest.approx(12e-6)
    assert measure([]).all == 0


def test_ranges_that_are_named_on_the_device_hide_nothing() -> None:
    """FSDP2 names what it does, and torch's profiler shows the names as events of the device, beside the kernels."""
    host = [Event("aten::mm", 0, 1), Event("FSDP::all_gather", 0, 1, is_range=True)]
    kernels = [Event("ampere_gemm", 2, 5, True), Event("ncclDevKernel_AllGather_RING_LL", 4, 9, True)]
    named = [Event("FSDP::all_gather (layers.0)", 4, 9, True, True), Event("nccl:all_gather", 3, 10, True, True)]
    assert measure([*host, *kernels, *named]).waited == pytest.approx(4e-6)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_documents_of_batches() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8])
    assert _lengths({"input_ids": ids}) == [[8], [8]]
    assert _lengths({"input_ids": ids, "attention_mask": mask, "labels": ids}) == [[5], [8]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    labels = torch.tensor([[-100, 1, 1, -100, 1, -100, -100, -100], [-100] * 7 + [1]])
    packed = {"input_ids": ids, "position_ids": positions, "labels": labels}
    assert _lengths(packed) == [[3, 2], [8]]  # the last document of the first row is padding
    found = documents_of(packed)
    assert found is not None
    assert count_documents(found, [None, 2]).tolist() == [13, 9 + 4 + 64, 6 + 4 + 16]
    assert documents_of([ids]) is None
    assert documents_of({"pixel_values": ids.float()}) is None


def _lengths(batch: Any) -> list[list[int]]:
    found = documents_of(batch)
    assert found is not None
    return [[n for n in row if n] for row in found.tolist()]


def test_names_of_the_driver() -> None:
    assert hardware_of("NVIDIA H100 80GB HBM3") is HARDWARE["h100"]
    assert hardware_of("NVIDIA A100-SXM4-80GB") is HARDWARE["a100"]
    assert hardware_of("NVIDIA H100 PCIe") is None
    assert hardware_of("NVIDIA GeForce RTX 4090") is None
