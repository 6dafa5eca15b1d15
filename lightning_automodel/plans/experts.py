"""Finds the modules that hold stacked experts, and says which rank computes which of them.

What is needed of a module is one of two seams; its own parameters are [experts, ...]:

* ``forward(hidden, top_k_index, top_k_weights)`` with hidden states [tokens, hidden], and for each token the indices
  and weights [tokens, k] of its experts;
* ``forward(hidden)`` with [experts * rows, hidden], as many rows for each expert, those of one below those of another.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.structure import class_names, find_blocks, find_towers, outermost, text_config
from lightning_automodel.modules.wrappers import name_without_wrappers, without_wrappers
from lightning_automodel.plans.selection import wildcard

_COUNT = re.compile(r"^(n|num|total)_(.*_)?experts$")
_STACKED_IN_PLANS = "grouped_gemm"  # what transformers calls parameters whose first dim is the experts


@dataclass(frozen=True)
class StackedExperts:
    """A module of experts.

    Attributes:
        name: of the module, in the model without adapters.
        number: of experts.
        stacked: its parameters, [number, ...] each.
        counts: its attributes that hold the number.
        sorts_rows: whoever calls it gives it rows for each expert, and no routes.
    """

    name: str
    number: int
    stacked: tuple[str, ...]
    counts: tuple[str, ...]
    sorts_rows: bool = False


@dataclass(frozen=True)
class Owners:
    """Which rank computes which experts, and in which order. Nobody stores other experts than without ``ep``.

    Twelve experts, dp_shard=4, ep=2. FSDP2 stores chunk r on rank r; an all-gather over efsdp gives ep rank j the
    chunks j, ep + j, ...::

        rank           0            1            2            3
        (efsdp, ep)    (0, 0)       (0, 1)       (1, 0)       (1, 1)
        stores         0 1 2        3 4 5        6 7 8        9 10 11
        computes       0 1 2 6 7 8  3 .. 9 ..    0 1 2 6 7 8  3 .. 9 ..
        tokens of      0 and 1      0 and 1      2 and 3      2 and 3

    Attributes:
        number: of experts; ``ep * efsdp`` divides it.
        ep: ranks that exchange tokens.
        efsdp: ranks that share the storage of one ep rank's experts.
    """

    number: int
    ep: int
    efsdp: int = 1

    @property
    def local(self) -> int:
        """Count the experts that a rank computes."""
        return self.number // self.ep

    def of_rank(self, rank: int) -> Tensor:
        """List the experts that ep rank ``rank`` computes, in its order: int64 [local]."""
        return self.places().argsort()[rank * self.local : (rank + 1) * self.local]

    def places(self) -> Tensor:
        """Give each expert its place, ``owner * local + index at the owner``: int64 [number]."""
        chunk = self.number // (self.ep * self.efsdp)
        expert = torch.arange(self.number)
        rank = expert // chunk
        return (rank % self.ep) * self.local + rank // self.ep * chunk + expert % chunk


def find_experts(model: nn.Module, shards: int, ep: int) -> dict[str, StackedExperts]:
    """Finds the modules of stacked experts in ``model``, except for those in towers, which batches may skip.

    Args:
        model: with or without adapters; parameters may be on the meta device.
        shards: ranks that store all experts together (dp_shard x cp).
        ep: ranks that exchange tokens.

    Returns:
        them by their names in the model without adapters; nothing for a dense model, with a warning.

    Raises:
        ValueError: naming what is missing and the way out: a module of experts lacks the seam, the number does not
            divide, or the model's own plan names others.
    """
    with without_wrappers(model):
        towers = list(find_towers(model))
        modules = {n: m for n, m in model.named_modules() if outermost(towers, n) is None}
        found = {name: experts for name, module in modules.items() if (experts := stacked_experts(name, module))}
        if not found:
            _check_none(model, ep)
        for name, experts in found.items():
            _check_seam(name, modules[name], experts, ep)
            _check_number(model, experts, shards, ep)
        _check_shared(modules, found, ep)
        _check_one_per_block(list(find_blocks(model)), found, ep)
        _compare_with_plan(model, found, towers)
    return found


def stacked_experts(name: str, module: nn.Module) -> StackedExperts | None:
    """Tell what the module ``name`` holds if its own parameters are those of several experts, one above the other."""
    counts = {key: value for key, value in vars(module).items() if _COUNT.match(key) and isinstance(value, int)}
    parameters = {key: p for key, p in own_parameters(module).items() if p is not None}
    stacked = tuple(key for key, p in parameters.items() if p.ndim >= 2 and p.shape[0] in counts.values())
    if len(stacked) < 2 or max(parameters[key].ndim for key in stacked) != 3:
        return None
    number = min(parameters[key].shape[0] for key in stacked)
    if number == 1:
        return None
    of_number = tuple(key for key, value in counts.items() if value == number)
    return StackedExperts(name, number, stacked, of_number, sorts_rows=_takes_rows_only(module))


def _inputs_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _takes_rows_only(module: nn.Module) -> bool:
    inputs = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [one.kind for one in inputs] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def has_experts(model: nn.Module) -> bool:
    """Tell whether ``model`` is a mixture of experts: by its config, or because a module stacks some."""
    return bool(_counts(model)) or any(stacked_experts(name, module) for name, module in model.named_modules())


def _counts(model: nn.Module) -> dict[str, int]:
    config = text_config(model)
    return {key: value for key, value in _fields(config).items() if _COUNT.match(key) and _is_several(value)}


def _check_none(model: nn.Module, ep: int) -> None:
    counts = _counts(model)
    if not counts:
        return warn_once(f"ep={ep} does nothing for {class_names(model)[0]}, which has no experts: it is sharded")
    listed = " and ".join(f"{key}={value}" for key, value in counts.items())
    raise ValueError(
        f"ep={ep}: {class_names(model)[0]} ({listed}) has no module that holds its experts stacked, with "
        "forward(hidden_states, top_k_index, top_k_weights): either its config turns them off, or where a token meets "
        "an expert is not known; use ep=1, where FSDP2 gathers the experts, or tp"
    )


def _fields(config: Any) -> Mapping[str, Any]:
    nested = [vars(value) for value in vars(config).values() if hasattr(value, "to_dict")] if config is not None else []
    merged: dict[str, Any] = {}
    for fields in (*nested, vars(config) if config is not None else {}):
        merged.update(fields)
    return merged


def _is_several(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _check_seam(name: str, module: nn.Module, experts: StackedExperts, ep: int) -> None:
    kind = f"{wildcard(name)} ({type(module).__name__})"
    instead = "use ep=1, where FSDP2 gathers the experts"
    sizes = {key: own_parameters(module)[key].shape[0] for key in experts.stacked}  # type: ignore[union-attr]
    if set(sizes.values()) != {experts.number}:
        listed = ", ".join(f"{key}: {size}" for key, size in sizes.items())
        raise ValueError(
            f"ep={ep}: the parameters of {kind} are not of one number of experts ({listed}), because some experts "
            f"return what they are given; {instead}"
        )
    inputs = _inputs_of(module)
    if len(inputs) != 3 and not experts.sorts_rows:
        raise ValueError(
            f"ep={ep}: the experts of {kind} are called with ({', '.join(inputs)}) and not with (hidden_states, "
            "top_k_index, top_k_weights), or with the rows of one expert below those of the other: which rows belong "
            f"to which experts is not known; {instead}"
        )
    others = [key for key, _ in module.named_parameters() if key not in experts.stacked]
    if others:
        raise ValueError(
            f"ep={ep}: {kind} holds {others[0]} beside its stacked experts, and how many tokens a rank gives to that "
            f"differs from rank to rank; {instead}"
        )
    of_experts = [key for key, buffer in module.named_buffers() if buffer.ndim and len(buffer) == experts.number]
    if of_experts:
        raise ValueError(
            f"ep={ep}: {kind} holds the buffer {of_experts[0]} of {experts.number} rows, one of each expert, and only "
            f"parameters are divided; make it a parameter [experts, ...] of two dims or more, or {instead}"
        )


def _check_number(model: nn.Module, experts: StackedExperts, shards: int, ep: int) -> None:
    if experts.number % shards == 0:
        return
    fitting = max(n for n in range(1, shards + 1) if experts.number % n == 0 and shards % n == 0)
    sizes = [n for n in range(2, fitting + 1) if fitting % n == 0]
    others = f"ep={sizes[-1]} with dp_shard x cp = {fitting} and dp_replicate={shards // fitting}" if sizes else "ep=1"
    raise ValueError(
        f"ep={ep}: {wildcard(experts.name)} of {class_names(model)[0]} has {experts.number} experts, and dp_shard x cp "
        f"= {shards} does not divide them: each data rank stores as many whole experts as the others; use {others}"
    )


def _check_shared(modules: Mapping[str, nn.Module], found: Mapping[str, StackedExperts], ep: int) -> None:
    holders: dict[int, str] = {}
    for name, experts in found.items():
        for key in experts.stacked:
            other = holders.setdefault(id(own_parameters(modules[name])[key]), name)
            if other != name:
                raise ValueError(
                    f"ep={ep}: {wildcard(other)} and {wildcard(name)} share their experts, which are gathered and "
                    "freed with one of them only; use ep=1"
                )


def _check_one_per_block(blocks: list[str], found: Mapping[str, StackedExperts], ep: int) -> None:
    """Refuse experts of several kinds side by side, such as those for tokens of images: ranks would wait for others."""
    in_block: dict[str, str] = {}
    for name in found:
        block = outermost(blocks, name)
        if block is not None and (other := in_block.setdefault(block, name)) != name:
            raise ValueError(
                f"ep={ep}: {wildcard(other)} and {wildcard(name)} are experts of one block, and a batch without tokens "
                "for one of them would leave the ranks that have some waiting; use ep=1"
            )


def _compare_with_plan(model: nn.Module, found: Mapping[str, StackedExperts], towers: list[str]) -> None:
    """Refuse a model whose own plan of expert parallelism names other parameters than its structure does."""
    rules = [rule for rule, style in (getattr(model, "ep_plan", None) or {}).items() if style == _STACKED_IN_PLANS]
    if not rules:
        return
    patterns = [re.compile(re.escape(rule).replace(r"\*", r"[^.]+") + "$") for rule in rules]
    names = [name_without_wrappers(name) for name, _ in model.named_parameters()]
    own = [name for name in names if outermost(towers, name) is None]
    planned = {name for name in own if any(pattern.match(name) for pattern in patterns)}
    ours = {f"{name}.{key}" for name, experts in found.items() for key in experts.stacked}
    if planned - ours:
        raise ValueError(
            f"the ep_plan of {class_names(model)[0]} stacks experts in {sorted(planned - ours)[0]}, which is no "
            "parameter of a module with forward(hidden_states, top_k_index, top_k_weights); use ep=1"
        )
    if ours - planned:
        raise ValueError(
            f"{sorted(ours - planned)[0]} of {class_names(model)[0]} looks like stacked experts, but the model's "
            "ep_plan does not name it; use ep=1, or complete the plan"
        )
