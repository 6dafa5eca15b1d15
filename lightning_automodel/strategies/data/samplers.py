"""Which samples a data rank sees: shares of samplers and of iterable datasets, the same on all ranks of a TP group.

====================  ====================================  ==================================
dataset               training                              evaluation
====================  ====================================  ==================================
map-style             equal shares, what remains is left    every sample once
                      out until the next shuffle
iterable              equal shares, an incomplete round of  every sample once
                      samples is dropped
iterable that         untouched                             untouched
shards itself
====================  ====================================  ==================================

Shares of a batch sampler that is not made around a sampler are of its batches (``shared_order.py``).
With ``Trainer(use_distributed_sampler=False)``, and for loaders that are no ``DataLoader``, the user divides the
samples, by ``strategy.data_rank`` of ``strategy.data_size``.
"""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import RunningStage
from torch.distributed import ProcessGroup
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
)

from lightning_automodel._compat.lightning.modules import add_worker_init_fn
from lightning_automodel._compat.lightning.trainer import (
    give_batch_size,
    overfits,
    replace_sampler_choice,
    sampler_of,
    uses_distributed_sampler,
)
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.strategies.data.shared_order import (
    DealtBatches,
    SharedOrder,
    deal_batches,
    is_of_trainer,
    share,
)
from lightning_automodel.strategies.data.stateful import draws_as_torch, with_what_state_says
from lightning_automodel.strategies.data.streams import divides_itself, share_of_loader


class LengthlessLoader:
    """A loader that does not tell its length: Lightning refuses, or leaves out, a rank whose length is 0."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


class LoaderOfLength(LengthlessLoader):
    """A loader that tells the length of the longest of all data ranks."""

    def __init__(self, loader: DataLoader, length: int) -> None:
        super().__init__(loader)
        self.length = length

    def __len__(self) -> int:
        return self.length


def install_samplers(trainer: "pl.Trainer", sampler_kwargs: dict[str, Any]) -> None:
    """Lets this module choose the sampler wherever Lightning injects one.

    Args:
        trainer: whose loaders are prepared.
        sampler_kwargs: ``num_replicas`` and ``rank`` of this data rank.
    """

    def choose(dataloader: DataLoader, shuffle: bool, mode: RunningStage | None) -> DistributedSampler:
        if dataloader.batch_size is None and type(batches := dataloader.batch_sampler) is BatchSampler:
            give_batch_size(dataloader, batches)
        # Trainer shuffles all training data that it shards; one device would see it in the order that the user gave.
        in_order = isinstance(sampler_of(dataloader), SequentialSampler) or overfits(trainer)
        return share_of_sampler(
            dataloader,
            shuffle=shuffle and not in_order,
            equal=mode == RunningStage.TRAINING,
            **sampler_kwargs,
        )

    def deal(dataloader: DataLoader, mode: RunningStage | None) -> DealtBatches | None:
        return deal_batches(dataloader, equal=mode == RunningStage.TRAINING, **sampler_kwargs)

    replace_sampler_choice(trainer, choose, deal)


def share_of_sampler(
    dataloader: DataLoader, *, shuffle: bool, equal: bool, num_replicas: int, rank: int
) -> DistributedSampler:
    """Makes the sampler of one data rank.

    Args:
        dataloader: with the sampler of one device.
        shuffle: what a ``DataLoader`` shuffles, in an order that depends on ``seed_everything`` and the epoch; a
            sampler of the user's own decides that by itself.
        equal: all shares are equally long, so that no rank waits for another one's last batch. No sample is drawn
            twice, unless there are fewer samples than shares.
        num_replicas: number of shares.
        rank: number of this share.
    """
    source: Any
    sampler_class: type[DistributedSampler]
    given = sampler_of(dataloader)
    if _is_of_loader(given, dataloader):
        source, sampler_class = dataloader.dataset, DistributedSampler
    else:
        source, sampler_class, shuffle = given, SharedOrder, False
    return share(sampler_class, source, equal=equal, num_replicas=num_replicas, rank=rank, shuffle=shuffle)


def _is_of_loader(sampler: Any, dataloader: DataLoader) -> bool:
    """Tell whether ``sampler`` gives each sample once, as those that a ``DataLoader`` makes by itself."""
    if isinstance(sampler, RandomSampler) or draws_as_torch(sampler):
        return not sampler.replacement and sampler.num_samples == sized_len(dataloader.dataset)
    return isinstance(sampler, SequentialSampler)


def process_dataloader(
    loader: object, trainer: "pl.Trainer", rank: int, size: int, group: ProcessGroup | None
) -> object:
    """Checks and completes a loader, after samplers are in place. Collective over ``group`` in evaluation, and for a
    sampler of the user's that divides.

    Args:
        loader: what the user passed or returned.
        trainer: in the stage that the loader is for.
        rank: of this process among the data ranks.
        size: number of data ranks.
        group: the data ranks; ``None`` before they have met.
    """
    if not isinstance(loader, DataLoader):
        return loader
    is_stream = has_iterable_dataset(loader) and not divides_itself(loader.dataset)
    is_divided = uses_distributed_sampler(trainer) and is_stream
    # Before Lightning does, by the global rank: a TP group must augment alike, and who reads one stream draw its order.
    add_worker_init_fn(loader, 0 if is_divided else rank)
    sampler = sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and not is_of_trainer(sampler) and group is not None:
        _warn_of_own_division(sampler, trainer, group)
    is_pipe = isinstance(loader.dataset, IterDataPipe)  # which a loader divides among all processes, those of tp, too
    if is_divided and (size > 1 or is_pipe):
        loader = share_of_loader(loader, rank, size, drop_last=trainer.training)
    if trainer.training:
        return with_what_state_says(loader, is_limited=isinstance(trainer.limit_train_batches, int))
    return loader if size == 1 or group is None else _with_agreed_length(loader, trainer, group)


def check_training_lengths(batches: int | float, device: torch.device) -> None:
    """Compares the number of training batches of all ranks, which take every step together. Collective.

    Args:
        batches: of an epoch on this rank; ``inf`` if unknown.
        device: that the process group communicates on.

    Raises:
        ValueError: on every rank, with the counts.
    """
    mine = torch.tensor(-1 if batches == float("inf") else int(batches), device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    counts = [int(count) for count in gathered]
    if len(set(counts)) > 1:
        shown = ", ".join(f"rank {rank}: {'unknown' if n < 0 else n}" for rank, n in enumerate(counts))
        usable = min((n for n in counts if n > 0), default=1)
        raise ValueError(
            f"the ranks have different numbers of training batches ({shown}), but every rank takes part in every step; "
            f"give all data ranks equally many, or use Trainer(limit_train_batches={usable})"
        )


def _warn_of_own_division(sampler: DistributedSampler, trainer: "pl.Trainer", group: ProcessGroup) -> None:
    """Warn of a sampler of the user's that divides the samples otherwise than the trainer would. Collective.

    Subclasses need not have the attributes of their base.
    """
    size = group.size()
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, [getattr(sampler, name, None) for name in ("num_replicas", "rank")], group=group)
    count = sized_len(getattr(sampler, "dataset", None))
    repeated = 0 if count is None else getattr(sampler, "total_size", count) - count
    if any(None in part for part in parts):
        return
    if sorted(parts) != [[size, rank] for rank in range(size)]:
        shown = "; ".join(f"num_replicas={replicas}, rank={rank}" for replicas, rank in parts)
        warn_once(
            f"the {type(sampler).__name__} of a loader does not divide its samples among {size} data ranks ({shown}), "
            "so samples are seen twice or by none of them, unless the dataset is a part already. Leave it out, and the "
            "trainer divides them; or give it num_replicas=strategy.data_size and rank=strategy.data_rank"
        )
    elif repeated > 0 and not trainer.training:
        warn_once(
            f"the {type(sampler).__name__} of a loader repeats {repeated} of its samples, for all data ranks to have "
            "equally many, and they count twice in what is evaluated. Leave it out, and every sample counts once"
        )


def _with_agreed_length(loader: DataLoader, trainer: "pl.Trainer", group: ProcessGroup) -> object:
    """Let all ranks take the same share of unlike lengths (``limit_val_batches=0.5``), and none be without one."""
    length = sized_len(loader)
    if length is None:
        return loader
    lengths: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lengths, length, group=group)
    if min(lengths) < max(lengths) and _is_share(_limit_of_stage(trainer)):
        return LoaderOfLength(loader, max(lengths))
    return LengthlessLoader(loader) if min(lengths) == 0 < max(lengths) else loader


def _limit_of_stage(trainer: "pl.Trainer") -> int | float:
    """Return the number of batches that the trainer takes of each loader of its present stage, or their share."""
    assert trainer.state.stage is not None
    return getattr(trainer, f"limit_{trainer.state.stage.dataloader_prefix}_batches")


def _is_share(limit: int | float) -> bool:
    return isinstance(limit, float) and limit < 1
