"""Private names of transformers, each with its reason: what it records during a forward pass, its look for packing."""

from collections.abc import Generator
from contextlib import contextmanager

from transformers import modeling_flash_attention_utils
from transformers.utils.output_capturing import _active_collector

_TEST_OF_PACKING = modeling_flash_attention_utils._is_packed_sequence


def recordings_of_call() -> dict[str, list]:
    """What transformers records inside of blocks during the present call of a model (router logits), by key."""
    active = _active_collector.get() or {}
    return {key: x for key, x in active.items() if isinstance(x, list) and key != "hidden_states"}


@contextmanager
def recording_inside_graph(recorded: dict[str, list]) -> Generator[None, None, None]:
    """Within this context, which a compiled graph enters, transformers records into ``recorded``.

    Its context variable cannot be traced; it reads plain attributes where the whole model is compiled.
    """
    _active_collector.compiling, _active_collector.global_var = True, recorded or None
    try:
        yield
    finally:
        _active_collector.compiling, _active_collector.global_var = False, None


def set_test_of_packing(active: bool) -> None:
    """Whether transformers' flash attention looks at the positions of every batch for several documents in a row.

    It reads their values on the host in every layer, and offers no way to tell it beforehand. Of the whole process.
    """
    test = _TEST_OF_PACKING if active else (lambda position_ids, batch_size: False)
    modeling_flash_attention_utils._is_packed_sequence = test
