"""Notices layers that hooks add to a model while it trains, when no rank can take its part of them any more."""

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle


class LateLayers:
    """Notes whether plain parameters were registered anywhere; looking for them in each step would take longer."""

    def __init__(self) -> None:
        self._have_come = False
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self.stop()
        self._handle = register_module_parameter_registration_hook(self._note)

    def stop(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
        self._have_come, self._handle = False, None

    def have_come(self) -> bool:
        """Tell whether some were registered since this was asked last."""
        found, self._have_come = self._have_come, False
        return found

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        self._have_come = self._have_come or not (parameter is None or isinstance(parameter, DTensor))
