"""Private names of transformers, each with its reason: records of forward passes, and the test for packed rows."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.utils.output_capturing import _active_collector

_TEST_OF_PACKING = modeling_flash_attention_utils._is_packed_sequence


def plan_of_class(kind: type[PreTrainedModel]) -> dict[str, str]:
    """Return the tensor-parallel plan that a class declares for itself; instances show a merged one only."""
    return kind._tp_plan or {}


def checkpoints_with_cache(layer: nn.Module) -> bool:
    """Tells whether a layer of transformers may be recomputed while it writes a cache."""
    return bool(getattr(layer, "_can_checkpoint_with_cache", False))


def recordings_of_call() -> dict[str, list]:
    """Returns what transformers records inside of blocks during the present call of a model, by key."""
    active = _active_collector.get() or {}
    return {key: x for key, x in active.items() if isinstance(x, list) and key != "hidden_states"}


@contextmanager
def recording_inside_graph(recorded: dict[str, list]) -> Generator[None, None, None]:
    """Makes transformers record into ``recorded`` inside of a compiled graph, within this context.

    Its context variable cannot be traced; it reads plain attributes where the whole model is compiled.
    """
    _active_collector.compiling, _active_collector.global_var = True, recorded or None
    try:
        yield
    finally:
        _active_collector.compiling, _active_collector.global_var = False, None


def set_test_of_packing(active: bool) -> None:
    """Turns transformers' test of packed documents in flash attention on or off, for the whole process.

    It reads their values on the host in every layer, and offers no way to tell it beforehand. Of the whole process.
    """
    test = _TEST_OF_PACKING if active else (lambda position_ids, batch_size: False)
    modeling_flash_attention_utils._is_packed_sequence = test
