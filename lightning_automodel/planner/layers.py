"""Runs few layers in the place of many: layers of one kind cost the same, so what one more costs is measured.

A Llama of 80 layers is played with 4 and with 5::

    cost(80) = cost(4) + 76 * (cost(5) - cost(4))

With layers of several kinds (dense and mixture-of-experts, full and linear attention) there is one more run per kind.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_automodel.modules.structure import find_blocks, outermost, text_config
from lightning_automodel.planner.watch import Watched

BASE = 4
"""Layers of each kind that the first run has: fewer have another peak, for units are gathered two ahead."""
MOST_KINDS = 4
_PLACE = ("layer_idx", "layer_id", "layer_number", "idx", "index")
_SIMPLE = (int, float, str, type(None))


@dataclass(frozen=True)
class Kinds:
    """The blocks of a model by what they cost.

    Attributes:
        names: qualified names of the blocks of each kind, in the order of the model.
        owner: name of the one module list that holds them all; ``None``: there is none, and all blocks are run.
    """

    names: list[list[str]]
    owner: str | None

    @property
    def runs_all(self) -> bool:
        """Tell whether so few are left out that the whole model is run."""
        total = sum(map(len, self.names))
        return self.owner is None or len(self.names) > MOST_KINDS or total <= (BASE + 1) * len(self.names)


def kinds_of(model: nn.Module) -> Kinds:
    """Group the blocks of ``model`` by class, shapes and settings, and by what trains in them and before them."""
    found: dict[Any, list[str]] = {}
    blocks = find_blocks(model)
    behind = trains_before(model, blocks)
    for name, block in blocks.items():
        found.setdefault((_signature(block), behind[name]), []).append(name)
    owners = {name.rpartition(".")[0] for name in blocks}
    return Kinds(list(found.values()), owners.pop() if len(owners) == 1 else None)


def trains_before(model: nn.Module, blocks: Iterable[str]) -> dict[str, bool]:
    """Tell of each block whether anything before it trains: its backward pass then goes on, frozen as it may be."""
    found: dict[str, bool] = {}
    names, trains = list(blocks), False
    for name, module in model.named_modules():
        if (block := outermost(names, name)) is not None:
            found.setdefault(block, trains)
        trains = trains or any(p.requires_grad for p in module.parameters(recurse=False))
    return found


def _signature(block: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    settings = tuple(
        (name, type(module).__name__, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, _SIMPLE) and not key.startswith("_") and key not in _PLACE
    )
    return type(block).__name__, shapes, settings


def cut_model(model: nn.Module, kinds: Kinds, counts: list[int]) -> nn.Module:
    """Return a copy of ``model`` with the first ``counts[i]`` blocks of kind ``i`` only."""
    assert kinds.owner is not None
    kept = {name for names, count in zip(kinds.names, counts, strict=True) for name in names[:count]}
    whole = model.get_submodule(kinds.owner)
    assert isinstance(whole, nn.ModuleList)
    places = [i for i in range(len(whole)) if f"{kinds.owner}.{i}" in kept]
    memo = {id(block): None for i, block in enumerate(whole) if i not in places}
    blocks = list(whole)
    parent, _, name = kinds.owner.rpartition(".")
    try:
        setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[i] for i in places))
        cut = copy.deepcopy(model, memo)
    finally:
        setattr(model.get_submodule(parent), name, whole)
    _cut_config(cut, len(blocks), places)
    return cut


def _cut_config(model: nn.Module, total: int, places: list[int]) -> None:
    """Let what the config lists per layer fit the layers that are left."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    configs[0] = text_config(model)
    for config in filter(None, configs.values()):
        for key, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == total:
                setattr(config, key, [value[i] for i in places])
            elif key == "num_hidden_layers" and value == total:
                config.num_hidden_layers = len(places)


def extrapolate(model: nn.Module, play: Callable[[nn.Module], Watched], least: int = BASE) -> tuple[Watched, str]:
    """Return what a step of the whole ``model`` does, and a sentence on how that is known.

    Args:
        model: on the meta device; stays as it is.
        play: makes a model parallel and runs a step.
        least: layers of each kind that are run.
    """
    (watched,), basis = extrapolate_each(model, lambda cut: [play(cut)], least)
    return watched, basis


def extrapolate_each(
    model: nn.Module, play: Callable[[nn.Module], Sequence[Watched]], least: int = BASE
) -> tuple[list[Watched], str]:
    """Return what several steps do, all of which ``play`` runs on one model; else as :func:`extrapolate`."""
    kinds = kinds_of(model)
    if kinds.runs_all:
        return list(play(copy.deepcopy(model))), "all layers were run"
    base = [min(least, len(names)) for names in kinds.names]
    first = play(cut_model(model, kinds, base))
    terms = [(first, 1)]
    for i, names in enumerate(kinds.names):
        if len(names) > base[i]:
            more = [count + (i == k) for k, count in enumerate(base)]
            times = len(names) - base[i]
            terms += [(play(cut_model(model, kinds, more)), times), (first, -times)]
    ran, layers = (" + ".join(map(str, counts)) for counts in (base, map(len, kinds.names)))
    steps = [combine([(watched[i], times) for watched, times in terms]) for i in range(len(first))]
    return steps, f"{ran} of {layers} layers were run, and one more of each kind"


def combine(terms: Sequence[tuple[Watched, int]]) -> Watched:
    """Sum what several steps do, each so many times."""
    total = Watched()
    for watched, times in terms:
        for name in ("counts", "volume", "flops", "recomputed", "traffic", "saved", "parameters"):
            _add(getattr(total, name), getattr(watched, name), times)
        for place, roles in watched.places.items():
            _add(total.places.setdefault(place, Counter()), roles, times)
    return total


def _add(total: Counter[Any], more: Counter[Any], times: int) -> None:
    for key, value in more.items():
        total[key] += times * value
