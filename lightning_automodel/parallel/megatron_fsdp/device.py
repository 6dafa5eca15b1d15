"""Where Megatron-FSDP runs."""

import torch


def require_cuda(device: torch.device) -> None:
    """Refuses CPU: Megatron-FSDP works with CUDA streams and events everywhere.

    Raises:
        ValueError: on any other device.
    """
    if device.type != "cuda":
        raise ValueError(
            f"Megatron-FSDP needs CUDA devices, and this is {device.type!r}; use FSDP2TPStrategy (or "
            "fsdp2_strategy_parallelize), which shards the same over the same sizes on any device"
        )
