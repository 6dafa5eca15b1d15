"""LoRA on stacked experts: the factors of all experts stay whole on all ranks, and each rank uses those of its own.

peft lays the factors of E experts beside one another: ``lora_A`` [E * r, in], expert after expert, and ``lora_B``
[out, r * E], where the expert changes fastest. They are small, so they stay where FSDP2 has them without ``ep``.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_automodel.distributed.collectives import scale_gradient
from lightning_automodel.modules.forward import SharedByCopies
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.modules.wrappers import is_wrapper
from lightning_automodel.plans.experts import Owners

_FACTORS = ("lora_A", "lora_B")


def take_factors(outermost: nn.Module, owners: Owners, rank: int) -> None:
    """Make the adapters around a module of experts compute with the factors of the experts of ep rank ``rank``.

    Args:
        outermost: the module of experts, or the wrapper around the wrappers around it.
        owners: who computes which experts.
        rank: of this process.

    Raises:
        ValueError: for adapters of another kind.
    """
    swap, mine = ParameterSwap(stored=Tensor), owners.of_rank(rank)
    wrapper = outermost
    while is_wrapper(wrapper):
        for kind, by_adapter in wrapper.named_children():
            if kind == "base_layer" or next(by_adapter.parameters(), None) is None:
                continue
            _check(kind, wrapper)
            for layer in by_adapter.children():
                swap.add(layer, "weight", _Factor(mine, owners.number, kind == "lora_A", owners.ep))
        wrapper.num_experts = owners.local  # type: ignore[assignment]
        wrapper = wrapper.get_submodule("base_layer")
    if wrapper is not outermost:
        swap.install(outermost)


def _check(kind: str, wrapper: nn.Module) -> None:
    if kind not in _FACTORS or not hasattr(wrapper, "num_experts"):
        raise ValueError(
            f"ep: {kind} of a {type(wrapper).__name__} around stacked experts: which part of it belongs to which "
            "expert is not known; use LoRA with target_parameters, or ep=1"
        )


@dataclass(frozen=True)
class _Factor(SharedByCopies):
    """Cuts the experts of a rank out of a factor of all experts, with the gradient that it has without ``ep``.

    FSDP2 averages it over all data ranks, and what travels divided the gradients of experts by ``ep`` already.
    """

    mine: Tensor
    number: int
    expert_first: bool
    ep: int

    def __call__(self, factor: Tensor) -> Tensor:
        mine = self.mine.to(factor.device)
        if self.expert_first:
            rows = factor.view(self.number, -1, factor.shape[-1])[mine].flatten(0, 1)
        else:
            rows = factor.view(len(factor), -1, self.number)[..., mine].flatten(1)
        return scale_gradient(rows, float(self.ep))
