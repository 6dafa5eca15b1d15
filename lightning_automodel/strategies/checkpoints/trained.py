"""What trains, and which adapters are used, if any: a run that resumes goes on with what it had switched to.

Lightning and peft keep neither in a checkpoint, and a hook that thaws layers or switches adapters when an epoch begins
is not called again in the middle of it.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.checkpointing.states import clean_name

TRAINED = "trained"
"""Entry of a checkpoint of a run that has frozen, thawed or switched something since training began."""

State = dict[str, Any]
"""Whether each parameter trains, by name; names of the adapters in use by model; which layers use none of theirs."""


class Trained:
    """Notes what a run switches to, beside what it began with."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._holders: dict[str, Any] = {}
        self._adapted: dict[str, Any] = {}
        self._began = self._before_step = self._before_evaluation = self._evaluates = self._now()

    def begin(self, module: nn.Module, entry: dict[str, State] | None) -> None:
        """Note what a run begins with, and switch as the one of a checkpoint had, if it began alike.

        Args:
            module: as ``configure_model`` and hooks before training have left it.
            entry: of the checkpoint; where that run began with something else, what the code says now counts.
        """
        self._parameters = {clean_name(name): parameter for name, parameter in module.named_parameters()}
        self._holders = dict(_holders(module))
        self._adapted = dict(_adapted_layers(module))
        self._began = self._now()
        if entry is not None and all(began == self._began.get(kind) for kind, began in entry["began"].items()):
            self._switch_to(entry["now"])
        self.note_step()

    def note_step(self) -> None:
        """Note what a step begins with, before any hook of it: a checkpoint from within is done anew from there."""
        self._before_step = self._now()

    def note_before_evaluation(self) -> None:
        """Note what trains before the hooks of an evaluation's start."""
        self._before_evaluation = self._evaluates = self._now()

    def note_evaluation(self) -> None:
        """Note what an evaluation has switched to, behind those hooks."""
        self._evaluates = self._now()

    def entry(self, *, is_done_anew: bool, evaluates: bool) -> dict[str, State]:
        """Make the entry of a checkpoint; none where nothing was switched.

        Args:
            is_done_anew: what is so now is so for the rest of a step that is done anew.
            evaluates: within an evaluation, what its start has switched is so for its length; what its end has, stays.
        """
        now = self._before_step if is_done_anew else self._now()
        if evaluates:
            now = {kind: self._behind_evaluation(kind, now[kind]) for kind in now}
        return {} if now == self._began else {TRAINED: {"began": self._began, "now": now}}

    def _behind_evaluation(self, kind: str, now: dict[str, Any]) -> dict[str, Any]:
        before, during = self._before_evaluation[kind], self._evaluates[kind]
        return {name: before[name] if value == during[name] else value for name, value in now.items()}

    def _now(self) -> State:
        return {
            "trains": {name: parameter.requires_grad for name, parameter in self._parameters.items()},
            "active": {name: _active(holder) for name, holder in self._holders.items()},
            "disabled": {name: layer.disable_adapters for name, layer in self._adapted.items()},
        }

    def _switch_to(self, state: State) -> None:
        for name, adapters in state["active"].items():
            if adapters != _active(self._holders[name]):
                _switch(self._holders[name], adapters)
        for name, is_disabled in state.get("disabled", {}).items():
            if is_disabled != self._adapted[name].disable_adapters:
                self._adapted[name].enable_adapters(not is_disabled)
        for name, trains in state["trains"].items():
            self._parameters[name].requires_grad_(trains)


def _holders(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost modules that hold several adapters and switch them."""
    outer: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in outer):
            continue
        if len(getattr(child, "peft_config", None) or {}) > 1 and hasattr(child, "set_adapter"):
            outer.append(name)
            yield clean_name(name), child


def _adapted_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find what a disabling of adapters switches, whether one or several are there."""
    for name, child in module.named_modules():
        if isinstance(getattr(child, "disable_adapters", None), bool) and hasattr(child, "enable_adapters"):
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
