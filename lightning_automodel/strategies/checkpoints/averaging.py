"""Lightning's callbacks that average weights, on sharded ones: each rank averages what it holds.

Lightning copies the whole module before it is sharded. Under our strategies a ``WeightAveraging``,
``EMAWeightAveraging`` or ``StochasticWeightAveraging`` callback is given, for the length of a run, methods that keep
the average as tensors beside the module's own, in the same layout. Its arguments, its schedule and its entries in a
checkpoint stay what they are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.lightning.strategies import ExchangedAveraging, ExchangedStochasticAveraging
from lightning_automodel.checkpointing.files.dcp import fetch
from lightning_automodel.checkpointing.files.folder import CURRENT
from lightning_automodel.checkpointing.states import clean_name, model_state, named_state
from lightning_automodel.distributed.shards import copy_from_whole, local_tensor
from lightning_automodel.distributed.uneven_shards import like_parameter
from lightning_automodel.modules.adapted_bases import names_left_out
from lightning_automodel.parallel.fsdp2.running import reshard

_COUNTS = "averaging_state"


class ShardedAveraging(ExchangedAveraging):
    """The methods that take the place of those of a ``WeightAveraging`` callback."""

    _saved: Mapping[str, Any] | None = None
    _is_exchanged = False  # within an evaluation the module holds the average

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Does nothing: :meth:`begin` follows when the module is sharded."""

    def begin(self, module: "pl.LightningModule") -> None:
        """Starts from the module's weights, or from what a checkpoint holds."""
        self._is_exchanged = False
        device = self._device or module.device
        self._average_model = _Average(module, device, use_buffers=self._use_buffers, **self._kwargs)
        if self._saved is not None:
            self._restore(module, self._saved)
            self._saved = None

    def _restore(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        assert self._average_model is not None
        averages = self._averages(module)
        fetch([(average, saved["state_dict"][name]) for name, average in averages.items()])
        _put_back(module, self._average_model.module, averages)
        count = saved[_COUNTS]["n_averaged"]
        self._average_model.n_averaged.copy_(count if isinstance(count, Tensor) else count.load())

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Makes the average the checkpoint's weights, as without sharding."""
        if self._average_model is not None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            if self._is_exchanged:  # an evaluation saves, or an error ended one
                left_out = {clean_name(name) for name in names_left_out(pl_module)}
                trained = {name: value for name, value in checkpoint["state_dict"].items() if name not in left_out}
                average = trainer.strategy.state_part(dict(model_state(pl_module)))  # type: ignore[attr-defined]
                checkpoint[CURRENT], checkpoint["state_dict"] = trained, average

    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Restores, while fitting, the weights that were being trained."""
        if trainer.state.fn == "fit" and CURRENT in checkpoint and _COUNTS in checkpoint:
            self._saved = {"state_dict": checkpoint["state_dict"], _COUNTS: checkpoint[_COUNTS]}
            checkpoint["state_dict"] = checkpoint[CURRENT]

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        """Updates the average when ``should_update`` says so."""
        super().on_train_batch_end(trainer, _Held(pl_module), *args)  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Updates the average when ``should_update`` says so."""
        super().on_train_epoch_end(trainer, _Held(pl_module))  # type: ignore[arg-type]

    def stand_in(self, module: "pl.LightningModule") -> "_Held":
        """Returns the rank's own memory of the module's weights."""
        return _Held(module)

    def note_exchange(self) -> None:
        """Keeps in mind which of the two the module holds."""
        self._is_exchanged = not self._is_exchanged

    def _averages(self, module: nn.Module) -> dict[str, Tensor]:
        assert self._average_model is not None
        return _averages(module, self._average_model.module)


class ShardedStochasticAveraging(ExchangedStochasticAveraging):
    """What takes the place of the methods of a ``StochasticWeightAveraging`` callback."""

    _saved: Mapping[str, Tensor] | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Does nothing: :meth:`begin` follows when the module is sharded."""

    def begin(self, module: "pl.LightningModule") -> None:
        """Starts from the module's weights, or from what a checkpoint holds."""
        average = _NamedParts(module)
        if self._saved is not None:
            average.load_state_dict(self._saved)
            self._saved = None
        self._average_model = average  # type: ignore[assignment]

    def load_average(self, state: Mapping[str, Tensor] | None) -> None:
        """Keeps what a checkpoint holds for :meth:`begin`."""
        self._saved = state

    def update_parameters(self, average_model: Any, model: nn.Module, *args: Any) -> None:  # type: ignore[override]
        """Averages what this rank holds."""
        super().update_parameters(average_model, _Held(model), *args)  # type: ignore[arg-type]

    def transfer_weights(self, src_pl_module: Any, dst_pl_module: nn.Module) -> None:  # type: ignore[override]
        """Gives the module the average of what this rank holds."""
        super().transfer_weights(src_pl_module, _Held(dst_pl_module))  # type: ignore[arg-type]


class _Held:
    """A rank's own memory of the parameters and buffers of a module, looked up when it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def parameters(self) -> Iterator[Tensor]:
        """Lists local tensors, in the module's order."""
        reshard(self.module)
        return (local_tensor(parameter) for parameter in self.module.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Lists buffers, in the module's order."""
        return self.module.buffers()


class _Parts(nn.Module):
    """A stand-in for a module's tensors that can be copied."""

    def __init__(self, held: _Held) -> None:
        super().__init__()
        for i, parameter in enumerate(held.parameters()):
            self.register_parameter(f"parameter{i}", nn.Parameter(parameter, requires_grad=False))
        for i, buffer in enumerate(held.buffers()):
            self.register_buffer(f"buffer{i}", buffer)


class _Average(AveragedModel):
    """An average whose state has the names of the module's: Lightning's own method saves it, also behind a run."""

    def __init__(self, module: "pl.LightningModule", *args: Any, **kwargs: Any) -> None:
        self.held = _Held(module)
        super().__init__(_Parts(self.held), *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns all of the module's state, with averages where there are any, and how many steps they are of."""
        module: Any = self.held.module
        averages = _averages(module, self.module)
        state = {name: averages.get(name, value) for name, value in model_state(module).items()}
        part = module.trainer.strategy.state_part(state)
        return {"n_averaged": self.n_averaged, **{f"module.{name}": value for name, value in part.items()}}


class _NamedParts(_Parts):
    """Averages of the parameters of a module under their names, each as the module's is sharded."""

    def __init__(self, module: nn.Module) -> None:
        self.held = _Held(module)
        super().__init__(self.held)
        for tensor in _tensors(self):
            tensor.data = tensor.data.clone()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the averages by the names that the module's state has."""
        return _averages(self.held.module, self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes this rank's parts of whole averages."""
        averages = self.state_dict()
        for name, average in averages.items():
            copy_from_whole(average, state_dict[name])
        _put_back(self.held.module, self, averages)


_SHARDED: dict[type, Any] = {
    WeightAveraging: ShardedAveraging,
    StochasticWeightAveraging: ShardedStochasticAveraging,
}


def adapt(callbacks: list[Any]) -> None:
    """Gives every callback that averages weights the methods of its sharded class."""
    for callback in callbacks:
        kind = type(callback)
        sharded = next((cls for base, cls in _SHARDED.items() if isinstance(callback, base)), None)
        if sharded is not None and not isinstance(callback, sharded):
            names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}  # its key in a checkpoint
            bases = (sharded, kind) if issubclass(sharded, kind) else (kind, sharded)  # a user's methods come first
            callback.__class__ = type(kind.__name__, bases, names)


def restore(callbacks: list[Any]) -> None:
    """Undo :func:`adapt`."""
    for callback in callbacks:
        if isinstance(callback, tuple(_SHARDED.values())):
            callback.__class__ = next(kind for kind in type(callback).__bases__ if kind not in _SHARDED.values())


def begin(callbacks: list[Any], module: "pl.LightningModule") -> None:
    """Starts the averages of a run."""
    for callback in callbacks:
        if isinstance(callback, ShardedAveraging | ShardedStochasticAveraging):
            callback.begin(module)


def _averages(module: nn.Module, parts: nn.Module) -> dict[str, Tensor]:
    """Lists the average of each parameter and persistent buffer, sharded as the module's."""
    pairs = zip(_tensors(module), _tensors(parts), strict=True)
    average = {id(original): _as(original, part) for original, part in pairs}
    return {name: average[id(value)] for name, value in named_state(module).items() if id(value) in average}


def _put_back(module: nn.Module, parts: nn.Module, averages: Mapping[str, Tensor]) -> None:
    """Overwrites ``parts`` with what :func:`_averages` gave and what was read into it."""
    by_id = {id(value): averages[name] for name, value in named_state(module).items() if name in averages}
    for original, part in zip(_tensors(module), _tensors(parts), strict=True):
        if id(original) in by_id:
            part.data.copy_(local_tensor(by_id[id(original)]))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _as(original: Tensor, local: Tensor) -> Tensor:
    local = local.detach()
    if not isinstance(original, DTensor):
        return local
    return like_parameter(original, dtensor_like(local.to(original.device), original))
