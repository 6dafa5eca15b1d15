"""How a loader cuts an epoch into batches, which a checkpoint says of each."""

from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DataLoader

from lightning_automodel._compat.lightning.progress import is_stateful
from lightning_automodel.strategies.data.rest_of_epoch import counts_batches
from lightning_automodel.strategies.data.shared_order import DealtBatches, SharedOrder


@dataclass(frozen=True)
class Batches:
    """How a loader cuts an epoch into batches.

    Attributes:
        size: samples per batch and data rank; ``None`` if a batch sampler of the user's decides, and does not say.
        data_ranks: number of them.
        workers: processes that read.
        length: batches of an epoch; ``None`` if unknown.
        is_cycled: the epoch goes on when this loader ends, which then begins anew.
        is_dealt: data ranks take whole batches of one order, in turn, and not samples.
    """

    size: int | None
    data_ranks: int
    workers: int
    length: int | None
    is_cycled: bool
    is_dealt: bool = False

    @classmethod
    def of(cls, loader: Any, data_ranks: int, is_cycled: bool) -> "Batches | None":
        """Describes ``loader``, if it is one of torch's, with no position of its own but a number of batches."""
        if not isinstance(loader, DataLoader) or (is_stateful(loader) and not counts_batches(loader)):
            return None
        size: int | None = loader.batch_size or 1
        if (order := _order_of_batches(loader)) is not None:
            size = getattr(order, "batch_size", None)
        elif loader.batch_sampler is not None:
            size = loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None
        return cls(size, data_ranks, loader.num_workers, sized_len(loader), is_cycled, order is not None)

    def __str__(self) -> str:
        size = "batches of a sampler of your own" if self.size is None else f"batches of {self.size}"
        size = f"{self.length} {size}" if self.is_dealt else size
        return f"{size} on {self.data_ranks} data ranks with {self.workers} workers"

    def items(self, through: int) -> int | None:
        """Count the samples, or batches that are dealt, of all data ranks after ``through`` batches, in the loader's
        present pass.
        """
        if self.length:
            through = through % self.length if self.is_cycled else min(through, self.length)
        size = 1 if self.is_dealt else self.size
        return None if size is None else through * size * self.data_ranks

    @property
    def samples_per_item(self) -> int | None:
        """Return how many samples an item has, if that is known."""
        return self.size if self.is_dealt else 1

    def divides_as(self, other: "Batches") -> bool:
        """Tells whether an item of one is an item of the other, as far as sizes and numbers of batches tell."""
        if not (self.is_dealt and other.is_dealt):
            return self.is_dealt == other.is_dealt
        if self.size != other.size or self.length is None or other.length is None:
            return self.size == other.size
        pairs = ((self.length, self.data_ranks), (other.length, other.data_ranks))
        least = max(length * ranks for length, ranks in pairs)
        return least < min((length + 1) * ranks for length, ranks in pairs)  # what does not divide is left out

    def equals(self, other: "Batches") -> bool:
        """Tells whether the same samples come in the same batches."""
        is_as_large = (self.size, self.data_ranks, self.workers) == (other.size, other.data_ranks, other.workers)
        return is_as_large and self.divides_as(other)


def _order_of_batches(loader: DataLoader) -> Any:
    """Return what the user has put in the place of a sampler or a batch sampler, if it gives indices by the batch, and
    what is divided over the ranks are batches then.
    """
    if isinstance(loader.batch_sampler, DealtBatches):
        return loader.batch_sampler.of_user
    sampler = loader.sampler
    order = sampler.of_user if isinstance(sampler, SharedOrder) else sampler
    return order if isinstance(order, BatchSampler) else None
