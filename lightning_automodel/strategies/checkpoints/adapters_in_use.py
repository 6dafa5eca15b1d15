"""Which of several adapters a run uses and trains: one that resumes goes on with those that it had switched to.

peft keeps neither in weights, and a hook that switches when an epoch begins is not called again in the middle of it.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.checkpointing.states import clean_name
from lightning_automodel.modules.wrappers import adapters_of

IN_USE = "adapters_in_use"
"""Entry of a checkpoint of a run that has switched adapters."""

State = dict[str, Any]
"""Names of the adapters in use by model, and names of the adapters' parameters that train."""


class AdaptersInUse:
    """Notes what a run switches to, beside what it began with."""

    def __init__(self) -> None:
        self._holders: dict[str, Any] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._began: State = {}
        self._before_batch: State = {}

    def note(self, module: nn.Module) -> None:
        """Take what ``configure_model`` has left for what the run begins with."""
        self._holders = dict(_holders(module))
        of_adapters = {id(p) for holder in self._holders.values() for p in adapters_of(holder)}
        self._parameters = {clean_name(n): p for n, p in module.named_parameters() if id(p) in of_adapters}
        self._began = self._before_batch = self._now()

    def note_batch(self) -> None:
        """Note what a batch begins with, for a checkpoint from which it is done anew."""
        if self._holders:
            self._before_batch = self._now()

    def entry(self, *, is_passing: bool) -> dict[str, State]:
        """Make the entry of a checkpoint; none where nothing was switched.

        Args:
            is_passing: what is in use now is so for the rest of a batch that is done anew, or for an evaluation.
        """
        now = self._before_batch if is_passing or not self._holders else self._now()
        return {} if now == self._began else {IN_USE: {"began": self._began, "now": now}}

    def restore(self, entry: dict[str, State] | None) -> None:
        """Switch as the run before had, if this one begins as that did; else what its code says counts."""
        if entry is None or entry["began"] != self._began:
            return
        for name, adapters in entry["now"]["active"].items():
            if adapters != _active(self._holders[name]):
                _switch(self._holders[name], adapters)
        trained = set(entry["now"]["trained"])
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(name in trained)

    def _now(self) -> State:
        return {
            "active": {name: _active(holder) for name, holder in self._holders.items()},
            "trained": [name for name, parameter in self._parameters.items() if parameter.requires_grad],
        }


def _holders(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost modules that hold several adapters and switch them."""
    outer: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in outer):
            continue
        if len(getattr(child, "peft_config", None) or {}) > 1 and hasattr(child, "set_adapter"):
            outer.append(name)
            yield clean_name(name), child


def _active(holder: Any) -> list[str]:
    found = holder.active_adapters
    return list(found() if callable(found) else found)


def _switch(holder: Any, adapters: list[str]) -> None:
    """Use ``adapters``. The model of peft takes one name; what it holds takes several."""
    if len(adapters) == 1:
        holder.set_adapter(adapters[0])
    else:
        own_children(holder).get("base_model", holder).set_adapter(adapters)
