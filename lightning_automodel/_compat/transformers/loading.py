"""Private names of transformers: the steps of ``from_pretrained``, and its report."""

import inspect
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.core_model_loading import WeightConverter, WeightRenaming, revert_weight_conversion
from transformers.utils.loading_report import LoadStateDictInfo

__all__ = ["revert_weight_conversion"]


def forget_conversions(model: PreTrainedModel) -> None:
    """Let ``model`` be written as its class is, and not as the files that it was read from."""
    vars(model).pop("_weight_conversions", None)


def was_dequantized(model: PreTrainedModel) -> bool:
    """Tell whether a quantizer made plain numbers of what ``model`` was read from."""
    conversions = getattr(model, "_weight_conversions", None) or ()
    operations = (operation for each in conversions for operation in getattr(each, "operations", ()))
    return not getattr(model, "is_quantized", False) and any(hasattr(each, "hf_quantizer") for each in operations)


_Place = tuple[Any, str]
"""An owner (a module or a class), and the name of its attribute."""


@dataclass(frozen=True, kw_only=True)
class LoadingSteps:
    """What runs in the place of steps of ``from_pretrained``; functions take the original one first.

    Attributes:
        load: reads the weights.
        initialize: gives values to what the files lack.
        finalize: the last step.
        convert: a conversion of what was collected from the files.
        set_parameter: gives a parameter its value.
        shard_operation: in the place of ``DtensorShardOperation``: cuts a rank's part out of an entry of a file.
        dtensor_like: makes a DTensor of such a part.
        open_file: in the place of ``safetensors.safe_open``.
    """

    load: Callable
    initialize: Callable
    finalize: Callable
    convert: Callable
    set_parameter: Callable
    shard_operation: type
    dtensor_like: Callable
    open_file: type

    def by_place(self) -> dict[_Place, Any]:
        """Find what stands where in transformers while these steps run."""
        around = {
            (PreTrainedModel, "_load_pretrained_model"): self.load,
            (PreTrainedModel, "_initialize_missing_keys"): self.initialize,
            (PreTrainedModel, "_finalize_model_loading"): self.finalize,
            (WeightConverter, "convert"): self.convert,
            (WeightRenaming, "convert"): self.convert,  # what is quantized on the way
            (core_model_loading, "set_param_for_module"): self.set_parameter,
        }
        instead = {
            (core_model_loading, "DtensorShardOperation"): self.shard_operation,
            (core_model_loading, "_dtensor_from_local_like"): self.dtensor_like,
            (modeling_utils, "safe_open"): self.open_file,
        }
        return {place: _around(place, step) for place, step in around.items()} | instead


@contextmanager
def patched_pretrained_loading(steps: LoadingSteps) -> Generator[None, None, None]:
    """Let ``from_pretrained`` run ``steps`` within this context.

    transformers has no public hook between building on the meta device and reading weights, which is where a model must
    be sharded so that each rank reads its own slices only.
    """
    with _replaced(steps.by_place()):
        yield


@contextmanager
def _replaced(values: Mapping[_Place, Any]) -> Generator[None, None, None]:
    before = {place: inspect.getattr_static(*place) for place in values}
    try:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def _around(place: _Place, function: Callable) -> Any:
    """Call ``function`` with what stands at ``place`` first: a static method stays one, a method passes its object."""
    original = inspect.getattr_static(*place)
    if isinstance(original, staticmethod):
        return staticmethod(partial(function, original.__func__))
    return _method(function, original) if inspect.isclass(place[0]) else partial(function, original)


def _method(function: Callable, original: Callable) -> Callable:
    def method(self: object, *args: object, **options: object) -> object:
        return function(original, self, *args, **options)

    return method


def empty_loading_info() -> LoadStateDictInfo:
    """Makes the report of ``from_pretrained`` for files that held exactly what the model needs."""
    return LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


@contextmanager
def reports_on_rank_zero() -> Generator[None, None, None]:
    """Let rank 0 alone log transformers' table of missing and unexpected weights."""
    log = logging.getLogger("transformers.modeling_utils")
    before = log.disabled
    log.disabled = before or (dist.is_initialized() and dist.get_rank() != 0)
    try:
        yield
    finally:
        log.disabled = before
