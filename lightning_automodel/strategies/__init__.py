"""Lightning strategies: hooks that call the parallelizer, and nothing else."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel._compat.lightning import bring_own_precision, choose_checkpoint_paths
from lightning_automodel.strategies.base import SharedHooks
from lightning_automodel.strategies.ddp import DDPStrategy
from lightning_automodel.strategies.fsdp2_tp import FSDP2TPStrategy
from lightning_automodel.strategies.last import find_last
from lightning_automodel.strategies.megatron_fsdp import MegatronFSDPStrategy
from lightning_automodel.strategies.precision import choose_precision

for _strategy in (FSDP2TPStrategy, DDPStrategy, MegatronFSDPStrategy):
    StrategyRegistry.register(_strategy.strategy_name, _strategy, description=_strategy.__doc__ or "", override=True)
bring_own_precision(SharedHooks, choose_precision)

__all__ = ["DDPStrategy", "FSDP2TPStrategy", "MegatronFSDPStrategy"]
choose_checkpoint_paths(SharedHooks, find_last)
