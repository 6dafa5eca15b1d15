"""Private names of Lightning's trainer, each with its reason: how it makes its choices."""

import copy
import os
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.core import saving
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

_SELECTED_PATH = "selected_path_of_lightning_automodel"
_IS_LAST = "is_last_of_lightning_automodel"


def bring_own_precision(strategy: type, choose: Callable[[str, Precision | None], Precision]) -> None:
    """Lets ``choose`` make the precision plugin of trainers with that strategy.

    Lightning has a table of strategies that bring their own plugins (FSDP, DeepSpeed), closed to others. It refuses
    16-mixed for subclasses of ``ModelParallelStrategy``, and replaces it by bf16-mixed on CPU, before it asks any. It
    does so while a trainer is being built, when nothing else of it can be reached: the method of the class is replaced,
    once, and goes on to Lightning's for every other strategy.

    Args:
        strategy: subclasses count.
        choose: from the name that the user gave, and the user's plugin if there is one.
    """
    original = _AcceleratorConnector._check_and_init_precision
    if hasattr(original, "__wrapped__"):
        return

    def check_and_init_precision(self: _AcceleratorConnector) -> Precision:
        if isinstance(self.strategy, strategy):
            return choose(self._precision_flag, self._precision_plugin_flag)
        return original(self)

    _AcceleratorConnector._check_and_init_precision = update_wrapper(check_and_init_precision, original)  # type: ignore[method-assign]


def choose_checkpoint_paths(strategy: type, find_last: Callable[[Trainer, Any], Any]) -> None:
    """Makes trainers with that strategy keep which checkpoint a call starts from; see :func:`checkpoint_path_of`.

    Trainer keeps it in a local variable until after ``configure_model``, which wants to know whether weights that it
    would read from elsewhere are about to be overwritten. What "last" means is fixed in the same private method, which
    is called before the strategy hears of the trainer: the method of the class is replaced, once.

    Args:
        strategy: subclasses count.
        find_last: from a trainer with that strategy and what Lightning found, what ``ckpt_path="last"`` means.
    """
    original = _CheckpointConnector._select_ckpt_path
    if hasattr(original, "__wrapped__"):
        return

    def select(self: _CheckpointConnector, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        path = original(self, state_fn, ckpt_path, *args, **kwargs)
        if not isinstance(self.trainer.strategy, strategy):
            return path
        path = find_last(self.trainer, path) if ckpt_path == "last" else path
        vars(self).update({_SELECTED_PATH: path, _IS_LAST: ckpt_path == "last"})
        return path

    _CheckpointConnector._select_ckpt_path = update_wrapper(select, original)  # type: ignore[method-assign]


def read_folders(is_folder: Callable[[Any], bool], read: Callable[..., dict[str, Any]]) -> None:
    """Makes ``load_from_checkpoint`` of any module, which has no hook before its file is open, take folders. Once.

    Args:
        is_folder: tells whether a path or URL is a folder.
        read: from that, ``map_location`` and ``weights_only``: what a file would hold.
    """
    original = saving.pl_load
    if hasattr(original, "__wrapped__"):
        return

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, str | os.PathLike) and is_folder(path):
            return read(path, map_location, weights_only)
        return original(path, map_location=map_location, weights_only=weights_only)

    saving.pl_load = update_wrapper(load, original)  # type: ignore[assignment]


def checkpoint_folder(callback: ModelCheckpoint, trainer: Trainer) -> Any:
    """Returns the folder of ``callback``, which only a private method knows if the user gave none."""
    return callback.dirpath or callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]


def checkpoint_path_of(trainer: Trainer) -> Any:
    """Returns the checkpoint that the present call of ``trainer`` starts from, or ``None``."""
    return vars(trainer._checkpoint_connector).get(_SELECTED_PATH)


def starts_from_last(trainer: Trainer) -> bool:
    """Tells whether the present call of ``trainer`` was given ``ckpt_path="last"``."""
    return vars(trainer._checkpoint_connector).get(_IS_LAST, False)


def replace_checkpoint_path(trainer: Trainer, path: str) -> None:
    """Changes what :func:`checkpoint_path_of` gives."""
    vars(trainer._checkpoint_connector)[_SELECTED_PATH] = path


def average_watched_losses(trainer: Trainer, average: Callable[[Tensor], Tensor]) -> None:
    """Gives callbacks that judge a run by the loss of its steps what ``average`` makes of each.

    The search of ``Tuner.lr_find`` and ``LearningRateFinder`` ends and suggests a rate by the loss of rank 0,
    ``SpikeDetection`` ends a run if the loss of any rank is far from those that this rank had before; nothing public
    replaces either.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (_LRCallback, SpikeDetection)):
            vars(callback)["on_train_batch_end"] = partial(_end_batch_with_average, callback, average)


def end_search_of_rate(trainer: Trainer) -> bool:
    """End the search of ``Tuner.lr_find`` or ``LearningRateFinder`` behind this step, as it ends where losses grow.

    Returns:
        whether ``trainer`` runs one: nothing public tells.
    """
    is_searching = any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    trainer.should_stop = trainer.should_stop or is_searching
    return is_searching


def _end_batch_with_average(
    callback: Callback,
    average: Callable[[Tensor], Tensor],
    trainer: Trainer,
    module: LightningModule,
    outputs: Any,
    *args: Any,
) -> None:
    if isinstance(outputs, Tensor):
        outputs = average(outputs)
    elif outputs and "loss" in outputs:
        outputs = {**outputs, "loss": average(outputs["loss"])}
    type(callback).on_train_batch_end(callback, trainer, module, outputs, *args)


def is_accumulating(trainer: Trainer) -> bool:
    """Tells whether the last training batch was not the last of its optimizer step. Never so with manual
    optimization.
    """
    module = trainer.lightning_module
    loop = trainer.fit_loop.epoch_loop
    return (
        module is not None
        and module.automatic_optimization
        and loop.batch_progress.current.ready > 0
        and loop._should_accumulate()
    )


def begin_next_epoch(trainer: Trainer) -> None:
    """Begins the next epoch of a run that has resumed after the last batch of one.

    Lightning counts the epoch as done, but does not begin the next one (neither its counts nor its hooks). A checkpoint
    of that next epoch then has one epoch too few, so that who resumes from it gets other samples, and never ends.
    """
    loop = trainer.fit_loop
    progress: Any = loop.epoch_progress.total
    if loop.restarted_mid_epoch and progress.processed == progress.started:
        loop.reset_restart_stage()


def set_callbacks_for_epoch(trainer: Trainer) -> None:
    """Let Lightning's own callbacks set, in a run that resumes within an epoch, what holds until the epoch ends.

    They set it in ``on_train_epoch_start`` (how many micro-batches are a step, the schedule of averaging), which
    Lightning calls for whole epochs only, and which their checkpoints do not hold.
    """
    if trainer.fit_loop.restarted_mid_epoch:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


def tell_savers_of_resume(trainer: Trainer) -> None:
    """Tell Lightning's callbacks that save every so many steps that the step a run goes on from is saved.

    They do not keep which one they saved last. With gradient accumulation they would save that step again behind the
    first micro-batch, between the micro-batches of the next one.
    """
    if checkpoint_path_of(trainer) is None:
        return
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0:
            callback._last_global_step_saved = trainer.global_step


def skips_backward(trainer: Trainer) -> bool:
    """Tells whether batches pass forward only, and gradients stay: averaging counts the means of batch norms so."""
    return trainer.fit_loop._skip_backward


def overfits(trainer: Trainer) -> bool:
    """Tells whether ``Trainer(overfit_batches=...)`` is on: an attribute that Lightning does not declare."""
    return bool(getattr(trainer, "overfit_batches", 0))


def uses_distributed_sampler(trainer: Trainer) -> bool:
    """Returns the value of ``Trainer(use_distributed_sampler=...)``; Lightning keeps it private."""
    return trainer._accelerator_connector.use_distributed_sampler


def remembers_arguments(batch_sampler: object) -> bool:
    """Tells whether Lightning saw it being made, in a hook for loaders, and can make another of the same arguments."""
    return hasattr(batch_sampler, "__pl_saved_args")


def sampler_of(loader: DataLoader) -> Any:
    """Return what says the order, which is not the loader's sampler where the user gave a batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def give_batch_size(loader: DataLoader, batches: BatchSampler) -> None:
    """Let a loader that Lightning makes anew have batches as ``batches``, of which it keeps the sampler alone.

    It makes one from attributes, where a batch sampler leaves no size, or, for a loader that a hook has made, from what
    that was made of, among which there is none: batches of one row then (its own strategies train on them).
    """
    size = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    vars(loader).update(size)
    given = vars(loader).get("__pl_saved_kwargs", {})
    if "batch_sampler" in given:
        given.update(size)


def replace_sampler_choice(
    trainer: Trainer,
    choose: Callable[[DataLoader, bool, RunningStage | None], Iterable],
    deal: Callable[[DataLoader, RunningStage | None], Any],
) -> None:
    """Lets ``choose(loader, shuffle, stage)`` answer where Lightning injects a distributed sampler, unless
    ``deal(loader, stage)`` gives a batch sampler to be taken as it is.

    Lightning pads the samplers of validation and test, fails where prediction has fewer samples than ranks, and its
    public hook sees the loader after that. A batch sampler it makes anew around a sampler, whatever its first argument
    is.
    """
    connector = trainer._data_connector
    prepare, requires = connector._prepare_dataloader, connector._requires_distributed_sampler

    def requires_sampler(loader: DataLoader) -> bool:
        return requires(loader) and not isinstance(sampler_of(loader), DistributedSampler)

    def resolve(loader: DataLoader, shuffle: bool, mode: RunningStage | None = None) -> Iterable:
        return choose(loader, shuffle, mode) if requires_sampler(loader) else sampler_of(loader)

    def prepared(loader: object, shuffle: bool, mode: RunningStage) -> object:
        if (
            not isinstance(loader, DataLoader)
            or not requires_sampler(loader)
            or (batches := deal(loader, mode)) is None
        ):
            return prepare(loader, shuffle, mode)
        if mode == RunningStage.PREDICTING:
            batches = _IndexBatchSamplerWrapper(batches)  # tells writers of predictions the indices
        result = copy.copy(loader)
        vars(result).update(batch_sampler=batches, _iterator=None)
        return result

    connector._requires_distributed_sampler = requires_sampler  # type: ignore[method-assign,assignment]
    connector._resolve_sampler = resolve  # type: ignore[method-assign,assignment]
    connector._prepare_dataloader = prepared  # type: ignore[method-assign,assignment]
