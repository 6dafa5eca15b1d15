"""The table at the start of a run says what the run is."""

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_automodel import FSDP2Config
from lightning_automodel.strategies.start_table import START_TABLE
from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, fit, make_trainer, tiny_llama


def start_and_resume(directory: Path) -> list[list[str]]:
    """The tables of a run and of one that goes on from it, on every rank."""
    tables: list[list[str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("this run"):
                tables.append(record.getMessage().splitlines())

    logging.getLogger("lightning_automodel").addHandler(Keep())
    sizes: dict[str, Any] = {"tp": 2, "config": FSDP2Config(sequence_parallel=True)}
    fit(sizes, directory, epochs=1)
    fit({"tp": 2}, directory, epochs=3, resume=directory / "epoch=0.ckpt")
    logger = CSVLogger(directory, name="x" * 80)
    run = make_trainer({"tp": 2}, max_steps=1, num_sanity_val_steps=1, logger=logger)
    run.fit(Recorder(), batches(2), batches(2))
    if run.is_global_zero:
        tables.append((Path(logger.log_dir) / START_TABLE).read_text().splitlines())
    return tables


@pytest.mark.slow
def test_it_says_what_runs(pool4: Pool) -> None:
    ranks = pool4.run(start_and_resume, trainer=True, with_directory=True)
    first, resumed, short, kept = ranks[0]
    assert ranks[1:] == [[]] * 3  # rank 0 alone
    lines = dict(line.strip().split(maxsplit=1) for line in first[1:])
    assert lines["strategy"] == "FSDP2TPStrategy, dp_shard 2 x tp 2 = 4 ranks, cpu"
    total = sum(parameter.numel() for parameter in tiny_llama().parameters())
    assert lines["parameters"].startswith(f"{total:,}, all train; rank 0 holds ")
    assert lines["precision"] == "32-true, parameters stored in float32"
    assert lines["switches"] == "sequence_parallel=True"
    assert lines["steps"] == "2; 2 per epoch of 2 micro-batches"  # 16 rows, 2 at a time on each of 2 data ranks
    assert lines["output"].startswith("checkpoints in ")
    assert " done; " in "".join(resumed)
    assert "switches" not in "".join(short)
    assert [line[:60] for line in kept] == [line[:60] for line in short]
    assert kept[-1].endswith(f"/{'x' * 80}/version_0")  # of any length in the file
    assert all(len(line) <= 100 for line in (*first, *resumed, *short))
