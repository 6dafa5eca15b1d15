"""Reads what a run has logged: numbers over steps, the table at its start, its configuration."""

import csv
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightning_automodel.strategies.start_table import START_TABLE

METRICS = "metrics.csv"
_EVENTS = "events.out.tfevents.*"
_CONFIGS = ("config.yaml", "hparams.yaml")

Series = list[tuple[float, float]]
"""Steps and values, in the order of the steps."""


@dataclass(frozen=True)
class LoggedRun:
    """What a run has logged.

    Attributes:
        name: that no other run of the same page has.
        folder: its log directory.
        numbers: by name.
        table: about the start, empty if there is none.
        config: YAML, empty if there is none.
    """

    name: str
    folder: Path
    numbers: dict[str, Series]
    table: str
    config: str


def read_runs(folders: list[str]) -> list[LoggedRun]:
    """Read the runs in ``folders``, each the log directory of a run, or one above those of several.

    Raises:
        ValueError: if a folder has no logged numbers.
    """
    found = list(dict.fromkeys(folder for name in folders for folder in _log_folders(Path(name))))
    above = os.path.commonpath([folder.resolve().parent for folder in found])
    return [
        LoggedRun(
            os.path.relpath(folder.resolve(), above),
            folder,
            _numbers(folder),
            _text(folder, (START_TABLE,)),
            _text(folder, _CONFIGS),
        )
        for folder in found
    ]


def _log_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory; give the log directory of a run, such as lightning_logs/version_0")
    found = sorted({path.parent for kind in (METRICS, _EVENTS) for path in folder.rglob(kind)}, key=_in_order)
    if not found:
        raise ValueError(
            f"{folder} has no {METRICS} and no events of TensorBoard; give the log directory of a run whose logger is "
            "CSVLogger (--trainer.logger=CSVLogger) or TensorBoardLogger"
        )
    return found


def _in_order(folder: Path) -> list[tuple[int, str]]:
    """Order version_2 before version_10."""
    return [(len(part), part) for part in folder.parts]


def _text(folder: Path, names: tuple[str, ...]) -> str:
    return next((path.read_text(errors="replace") for name in names if (path := folder / name).is_file()), "")


def _numbers(folder: Path) -> dict[str, Series]:
    rows = _rows_of_csv(folder / METRICS) if (folder / METRICS).is_file() else _rows_of_events(folder)
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for step, name, value in rows:
        found[name][step] = value  # a resumed run takes steps again
    return {name: sorted(values.items()) for name, values in found.items()}


def _rows_of_csv(path: Path) -> Iterator[tuple[float, str, float]]:
    with path.open(newline="", errors="replace") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            step = _number(row.get("step"))
            if math.isnan(step):
                raise ValueError(f"{path}:{line}: there is no number of a step; CSVLogger writes a column 'step'")
            for name, value in row.items():
                if name not in (None, "step", "epoch") and value not in (None, ""):
                    yield step, name, _number(value)


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _rows_of_events(folder: Path) -> Iterator[tuple[float, str, float]]:
    if find_spec("tensorboard") is None:
        raise ValueError(f"{folder} has events of TensorBoard, which is not installed; pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        if name not in ("epoch", "hp_metric"):
            yield from ((event.step, name, event.value) for event in events.Scalars(name))
