"""Towers that FSDP2 leaves alone: frozen ones, of which every rank holds a replica."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


def replicate_towers(towers: dict[str, nn.Module], mp_policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Cast and sum by hooks the parameters that no unit holds: nothing gathers them."""
    for name, tower in towers.items():
        check = _FrozenCheck(name)
        check(tower)
        tower.register_forward_pre_hook(check)
    replicated = {p for tower in towers.values() for p in tower.parameters()}
    for parameter in replicated:
        if mp_policy.param_dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(mp_policy.param_dtype)
    return replicated


@dataclass(frozen=True)
class _FrozenCheck:
    """Before every forward pass of a tower: a callback may unfreeze it in the middle of a run."""

    name: str

    def __call__(self, tower: nn.Module, args: tuple = ()) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters()):
            raise ValueError(
                f'tower_policy="replicate" is for frozen towers, but {self.name} ({type(tower).__name__}) has '
                "parameters that train: their gradients would differ between the data ranks. Use "
                f'tower_policy="root" or "per_layer", or freeze it: {self.name}.requires_grad_(False)'
            )
