"""What peft cannot do with an adapter that has no weights, or with one of its kind, as sentences and before a run."""

from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn

from lightning_automodel.modules.wrappers import is_wrapper

_META = "meta tensor"


@contextmanager
def without_weights(config: Any) -> Generator[None, None, None]:
    """Adds adapters of ``config`` to layers on the meta device within this context.

    Raises:
        ValueError: if they are computed from the weights of these.
    """
    try:
        yield
    except NotImplementedError as error:
        if _META not in str(error).lower():
            raise
        raise ValueError(
            f"export: {type(config).__name__} computes with weights of the base when it is added to them, of which an "
            "export knows shapes; write it by save_pretrained(directory) of the PeftModel in on_train_end, on every "
            "rank"
        ) from error


def check_merges(model: nn.Module) -> None:
    """Check that peft has a way to add each adapter of ``model``, which is on the meta device, to its layer.

    Raises:
        ValueError: naming a layer of which it has none.
    """
    for name, wrapper in model.named_modules():
        if is_wrapper(wrapper) and hasattr(wrapper, "merge"):
            _rehearse(name, deepcopy(wrapper))


def _rehearse(name: str, wrapper: Any) -> None:
    kind = type(wrapper)
    try:
        wrapper.merge()
    except (NotImplementedError, ValueError) as error:
        if _META in str(error).lower():  # with values it goes on
            return
        raise ValueError(
            f"merge: {name} ({kind.__module__}.{kind.__name__}): {str(error) or 'this cannot be added to weights'}; "
            "export the adapters alone, and use PeftModel.from_pretrained(base, directory)"
        ) from error
    except RuntimeError:  # of values here and shapes there
        return
