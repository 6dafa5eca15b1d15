"""Models whose weights a checkpoint is to bring, and which have none until it has: what it leaves out would be zeros.

Which models a checkpoint holds, the names in it say, before the LightningModule has all of its own::

    from_pretrained, policy     --names below "policy."-->  reserved, not read
    from_pretrained, reference  --no other such names-->    read from its files
"""

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_automodel.checkpointing.states import clean_name, named_state


class AwaitedModels:
    """Those that were not read, and the tensors that the checkpoint has brought since."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._places: set[str] = set()
        self._brought: set[int] = set()

    def take_place(self, model: nn.Module, prefixes: Iterable[str]) -> bool:
        """Let ``model`` be the one below a prefix of the checkpoint that no other is yet; tell whether there is one."""
        place = next((prefix for prefix in prefixes if prefix not in self._places), None)
        if place is None:
            return False
        self._places.add(place)
        self._models.append(weakref.ref(model))
        return True

    def note(self, part: nn.Module, source: Mapping[str, Any]) -> None:
        """Keep in mind what of ``part`` the entries ``source`` have overwritten."""
        if self._models:
            names = {clean_name(name) for name in source}
            self._brought |= {id(value) for name, value in named_state(part).items() if name in names}

    def check(self) -> None:
        """Check that nothing is left without values.

        Raises:
            ValueError: naming a parameter, and the way to have it read from its files.
        """
        if any(self._left_out()):
            gc.collect()  # models that are in use no more
        for kind, name in self._left_out():
            raise ValueError(
                f"{name} of a {kind} is not in it, and from_pretrained did not read its files, since the checkpoint "
                "holds a model with weights of the same names; with strict_loading=False on the LightningModule the "
                "files of every model are read first. Or build the model that checkpoints leave out behind the one "
                "that they hold, or let them hold it, as an attribute of the LightningModule"
            )

    def _left_out(self) -> list[tuple[str, str]]:
        models = [model for reference in self._models if (model := reference()) is not None]
        return [
            (type(model).__name__, name)
            for model in models
            for name, value in named_state(model).items()
            if isinstance(value, Tensor) and id(value) not in self._brought
        ]
