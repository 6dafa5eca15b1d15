"""Lightning strategies: hooks that call the parallelizer, and nothing else."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel._compat import bring_own_precision, remember_checkpoint_paths
from lightning_automodel.strategies.fsdp2_tp import FSDP2TPStrategy
from lightning_automodel.strategies.precision import choose_precision

StrategyRegistry.register("fsdp2_tp", FSDP2TPStrategy, description=FSDP2TPStrategy.__doc__ or "", override=True)
bring_own_precision(FSDP2TPStrategy, choose_precision)

__all__ = ["FSDP2TPStrategy"]
remember_checkpoint_paths()
