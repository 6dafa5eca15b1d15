"""An Accelerator that is asked to split the model, which on CPU it does not do."""

from typing import Any


class NotUsedError(Exception):
    """What a library was asked for is not what it runs; it says nothing about it."""


def splitting_accelerator(tp: int) -> Any:
    """Make one with tensor parallelism, or else with FSDP2 where rank 0 reads and sends the others their parts.

    Raises:
        NotUsedError: where it takes the plugin for FSDP2 and does not use it.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig

    if tp > 1:
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=tp))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type != DistributedType.FSDP:
        raise NotUsedError(f"takes the plugin, and runs {accelerator.distributed_type} on CPU without a word")
    return accelerator
