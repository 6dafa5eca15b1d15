"""Refuses a forward pass that writes into parameters which are gathered for it: the shards would not have it.

::

    forward pass     w.data = normalize(w), w.clamp_(), max_norm     in the gathered copy, which is freed after it
    optimizer        reads and writes the shards                     without what was written
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_automodel._compat.fsdp2.units import gathered_parameters
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import find_adapted_parameters
from lightning_automodel.modules.writes import State, Writes

Gathered = Callable[[nn.Module], Iterable[tuple[nn.Module, str, Tensor]]]


def refuse_written_weights(unit: nn.Module, gathered: Gathered = gathered_parameters) -> None:
    """Compare the gathered parameters of a sharded ``unit`` before and behind its forward pass, from now on.

    A write that leaves every value as it was is none. The hooks raise a ``ValueError`` that names the parameter and the
    ways out.

    Args:
        unit: whose hooks that gather and free are installed.
        gathered: what it computes with: the module that has a parameter, its name and its values.
    """
    adapted = frozenset((layer, name) for _, layer, name in find_adapted_parameters(unit))
    watch = _Watch(gathered, adapted)
    unit.register_forward_pre_hook(watch.before)
    unit.register_forward_hook(watch.behind, prepend=True)


class _Watch:
    def __init__(self, gathered: Gathered, adapted: frozenset[tuple[nn.Module, str]]) -> None:
        self._gathered = gathered
        self._adapted = adapted  # put into themselves by what adapts them, in every pass
        self._writes = Writes()
        self._seen: dict[tuple[nn.Module, str], State] = {}

    def before(self, unit: nn.Module, args: tuple) -> None:
        self._seen = {
            (owner, name): self._writes.before((owner, name), tensor) for owner, name, tensor in self._gathered(unit)
        }

    def behind(self, unit: nn.Module, args: tuple, output: Any) -> None:
        seen, self._seen = self._seen, {}
        for owner, parameter, tensor in self._gathered(unit):
            key = owner, parameter
            if key in seen and key not in self._adapted and self._writes.changed(key, tensor, seen[key]):
                name = next((name for name, part in unit.named_modules() if part is owner), "")
                raise ValueError(_message(unit, f"{name}.{parameter}".removeprefix(".")))


def _message(unit: nn.Module, name: str) -> str:
    return (
        f"the forward pass of {class_names(unit)[0]} writes into its parameter {name}, which is gathered for that pass "
        "where data ranks share it: the shards, which the optimizer and checkpoints have, would keep what was there "
        "before. Compute another tensor there (normalize(weight), weight.clamp(...)) and leave the parameter as it is; "
        "or change it between two steps, in on_train_batch_start, where it is sharded and elements are changed one by "
        "one; or use DDPStrategy, if what is written does not depend on the samples"
    )
