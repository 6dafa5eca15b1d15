"""The layouts that the shared tests run in, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_automodel import DDPStrategy, FSDP2TPStrategy, MegatronFSDPConfig, MegatronFSDPStrategy
from tests.support import cuda_on_cpu


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks, how many of them see different samples, and what makes the strategy (keyword arguments added)."""

    ranks: int
    data_size: int
    make: Callable[..., Strategy]


def _fsdp2(tp: int, cp: int = 1) -> Callable[..., Strategy]:
    return lambda **arguments: FSDP2TPStrategy(tp=tp, cp=cp, **arguments)


def _megatron(tp: int, stage: int) -> Callable[..., Strategy]:
    def make(**arguments: Any) -> Strategy:
        cuda_on_cpu.install()
        config = MegatronFSDPConfig(zero_dp_strategy=stage, **arguments.pop("config", {}))
        return MegatronFSDPStrategy(tp=tp, config=config, **arguments)

    return make


LAYOUTS: dict[str, Layout] = {
    "ddp-1": Layout(ranks=1, data_size=1, make=DDPStrategy),
    "ddp-2": Layout(ranks=2, data_size=2, make=DDPStrategy),
    "ddp-4": Layout(ranks=4, data_size=4, make=DDPStrategy),
    "fsdp2-tp2": Layout(ranks=2, data_size=1, make=_fsdp2(2)),
    "fsdp2-dp2": Layout(ranks=2, data_size=2, make=_fsdp2(1)),
    "fsdp2-dp2-tp2": Layout(ranks=4, data_size=2, make=_fsdp2(2)),
    "fsdp2-cp2": Layout(ranks=2, data_size=1, make=_fsdp2(1, 2)),
    "fsdp2-dp2-cp2": Layout(ranks=4, data_size=2, make=_fsdp2(1, 2)),
    "fsdp2-cp2-tp2": Layout(ranks=4, data_size=1, make=_fsdp2(2, 2)),
    **{f"megatron{i}-dp2": Layout(ranks=2, data_size=2, make=_megatron(1, i)) for i in range(4)},
    "megatron3-tp2": Layout(ranks=2, data_size=1, make=_megatron(2, 3)),
    "megatron2-dp2-tp2": Layout(ranks=4, data_size=2, make=_megatron(2, 2)),
    "megatron3-dp2-tp2": Layout(ranks=4, data_size=2, make=_megatron(2, 3)),
}
