"""What data modules share that read files for training, validation and test: the splits, and a loader for each."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_automodel.finetuning.loader import EpochShuffle, ResumableLoader


class SplitDataModule(L.LightningDataModule):
    """Loads the rows of ``datasets``, which :meth:`setup` of a subclass fills by :meth:`_read`.

    Args:
        files: paths or globs of each split.
        batch_size: rows per micro-batch and data rank.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        num_workers: processes that assemble batches.

    Raises:
        ValueError: for sizes below 1; from ``setup``: for a fit without training files.
    """

    def __init__(
        self, files: dict[str, str | list[str] | None], batch_size: int, pad_to_multiple_of: int, num_workers: int
    ) -> None:
        super().__init__()
        for name, size in (("batch_size", batch_size), ("pad_to_multiple_of", pad_to_multiple_of)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self.files = files
        self.batch_size = batch_size
        self.pad_to_multiple_of = pad_to_multiple_of
        self.num_workers = num_workers
        self.datasets: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Reads the files of all splits."""
        if stage == "fit" and self.files["train"] is None:
            raise ValueError(f"{type(self).__name__}(train_files=None) cannot fit; give train_files")
        for split, files in self.files.items():
            if files is not None and split not in self.datasets:
                self.datasets[split] = self._read(split, files)

    def train_dataloader(self) -> DataLoader:
        """Load rows in an order of seed and epoch alone."""
        return self._loader("train", EpochShuffle)

    def val_dataloader(self) -> Any:
        """Load rows in order; no loader without files."""
        return self._loader("val") if "val" in self.datasets else []

    def test_dataloader(self) -> DataLoader:
        """Load rows in order."""
        return self._loader("test")

    def _read(self, split: str, files: str | list[str]) -> Dataset:
        raise NotImplementedError

    def _collator(self) -> Callable[[Any], Any]:
        raise NotImplementedError

    def _loader(self, split: str, sampler: Callable[[Any], Any] | None = None) -> DataLoader:
        if split not in self.datasets:
            raise ValueError(f"{type(self).__name__}({split}_files=None) has no {split} data; give {split}_files")
        dataset = self.datasets[split]
        return ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=None if sampler is None else sampler(dataset),
            collate_fn=self._collator(),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
