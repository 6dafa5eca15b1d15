"""Writes predictions to one file of JSON lines, in the order of the data, whatever rank computed them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_automodel.distributed.logs import log
from lightning_automodel.pages import check_folder

Row = dict[str, Any]


class PredictingTrainer(L.Trainer):
    """A trainer whose ``predict`` can write a file."""

    def predict(self, *args: Any, output: str | None = None, **kwargs: Any) -> Any:
        """Predicts, as ``Trainer.predict`` does.

        Args:
            args: those of ``Trainer.predict``.
            output: file of JSON lines that gets one object for each row of the data, in their order.
            kwargs: those of ``Trainer.predict``.
        """
        if output is None:
            return super().predict(*args, **kwargs)
        self.callbacks.append(PredictionFile(output))  # type: ignore[attr-defined]
        return super().predict(*args, **{**kwargs, "return_predictions": False})


class PredictionFile(BasePredictionWriter):
    """Collects what ``predict_step`` returns, a mapping of names to one value per row, and writes it at the end.

    Args:
        path: of the file; replaced if it is there.

    Raises:
        ValueError: if nothing can be written there, or ``predict_step`` returns anything else.
    """

    def __init__(self, path: str) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"--output={path} is a directory; give a file, such as {path.rstrip('/')}/scores.jsonl")
        check_folder("--output", self.path.parent)
        self._rows: dict[tuple[int, int], Row] = {}  # by loader and number of the row

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keeps the rows of a batch."""
        if batch_indices is None:
            raise ValueError("--output needs map-style data, of which the number of a row is known")
        rows = list(rows_of(prediction))
        if len(rows) != len(batch_indices):
            raise ValueError(f"predict_step returns {len(rows)} rows for a batch of {len(batch_indices)}; one for each")
        origin = getattr(getattr(trainer, "datamodule", None), "origin_of_prediction", None)
        for index, row in zip(batch_indices, rows, strict=True):
            place = {"row": index} if origin is None else origin(index)
            self._rows[dataloader_idx, index] = {**place, **row}

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gathers the rows of all ranks, and writes them on rank 0. Collective."""
        rows = self._gathered(trainer)
        if trainer.is_global_zero:
            with self.path.open("w", encoding="utf-8") as file:
                for key in sorted(rows):
                    file.write(json.dumps(rows[key], ensure_ascii=False) + "\n")
            log(f"wrote {len(rows)} rows to {self.path}")

    def _gathered(self, trainer: L.Trainer) -> dict[tuple[int, int], Row]:
        if not dist.is_initialized() or trainer.world_size == 1:
            return self._rows
        parts: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(self._rows, parts)
        return {key: row for part in parts or [] for key, row in part.items()}


def rows_of(prediction: Any) -> Iterator[Row]:
    """Take a batch of predictions apart.

    Args:
        prediction: names to tensors [batch, ...] or sequences of ``batch`` values.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(prediction, Mapping):
        kind = type(prediction).__name__
        raise ValueError(f"--output needs a predict_step that returns names to one value per row, not a {kind}")
    columns = [value.tolist() if isinstance(value, Tensor) else list(value) for value in prediction.values()]
    for values in zip(*columns, strict=True):
        yield dict(zip(prediction, values, strict=True))
