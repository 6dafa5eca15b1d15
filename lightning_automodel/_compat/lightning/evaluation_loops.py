"""Private names of Lightning's evaluation loops, each with its reason."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = ["PrefetchDataFetcher"]

# Nothing public lies between the last step on a loader and the reduction of what was logged.
EvaluationLoop = _EvaluationLoop | _PredictionLoop
METRIC_CACHE = "_computed"  # attribute of a torchmetrics metric: what compute() found since the last update()


def get_fetcher(loop: EvaluationLoop) -> object:
    """Returns what hands batches to ``loop``, from ``on_validation_start`` on."""
    return loop._data_fetcher


def set_fetcher(loop: EvaluationLoop, fetcher: PrefetchDataFetcher) -> None:
    """Replaces what hands batches to ``loop``, for this run."""
    loop._data_fetcher = fetcher


def mode_of(loader: CombinedLoader) -> str:
    """Returns how the batches of several loaders are combined."""
    return loader._mode


def is_sequential(loader: CombinedLoader) -> bool:
    """Tells whether one loader follows the other, so that batches say which loader they come from."""
    return mode_of(loader) == "sequential"


def end_loader(loop: EvaluationLoop, dataloader_idx: int) -> None:
    """Reduces what was logged under a loader of which this rank has no batch, as the loops of other ranks do."""
    if isinstance(loop, _EvaluationLoop):
        loop._results.dataloader_idx = dataloader_idx
        loop._store_dataloader_outputs()


def around_validation_start(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls ``before`` and ``after`` around the hooks with which each validation within training starts.

    The first hook of a strategy comes behind those of callbacks and of the module, and between others.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    start = type(loop).on_run_start

    def noted() -> None:
        before()
        start(loop)
        after()

    vars(loop)["on_run_start"] = noted


@contextmanager
def discarded_logs(
    trainer: Trainer, loop: EvaluationLoop, batch: object, dataloader_idx: int | None
) -> Generator[None, None, None]:
    """Lets ``self.log`` take part in reductions without counting its values, within this context.

    Keys that are new stay, with weight 0: they are reduced at the end of the loader, by every rank or by none.
    """
    if not isinstance(loop, _EvaluationLoop):  # prediction does not log
        yield
        return
    results, connector = loop._results, trainer._logger_connector
    kept, current_hook = dict(results), connector._current_fx
    results.clear()
    results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx
    try:
        yield
    finally:
        new = {key: entry for key, entry in results.items() if key not in kept or kept[key].has_reset}
        results.clear()
        results.update(kept)
        results.batch = results.batch_size = None
        connector._current_fx = current_hook
        for key, entry in new.items():
            if entry.is_tensor and entry.meta.sync.should:
                entry.reset()
                entry.has_reset = False
            if not entry.is_tensor or entry.meta.sync.should:
                results[key] = entry
