"""Lightning strategies: hooks that call the parallelizer, and nothing else."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel.strategies.ddp import DDPStrategy
from lightning_automodel.strategies.fsdp2_tp import FSDP2TPStrategy
from lightning_automodel.strategies.megatron_fsdp import MegatronFSDPStrategy

for _strategy in (FSDP2TPStrategy, DDPStrategy, MegatronFSDPStrategy):
    StrategyRegistry.register(_strategy.strategy_name, _strategy, description=_strategy.__doc__ or "", override=True)

__all__ = ["DDPStrategy", "FSDP2TPStrategy", "MegatronFSDPStrategy"]
