"""Lightning strategies: hooks that call the parallelizer, and nothing else."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_automodel.strategies.fsdp2_tp import FSDP2TPStrategy

StrategyRegistry.register("fsdp2_tp", FSDP2TPStrategy, description=FSDP2TPStrategy.__doc__ or "", override=True)

__all__ = ["FSDP2TPStrategy"]
