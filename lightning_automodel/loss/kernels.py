"""Kernels of other libraries for the loss from hidden states, on CUDA without tensor parallelism."""

from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_automodel.config.values import LOSS_KERNELS
from lightning_automodel.loss.vocab_parallel import check_smoothing


def check_kernel(kernel: str, tp: int, device_type: str) -> None:
    """Checks that ``kernel`` can run here.

    Raises:
        ValueError: if it is not installed, the device is not CUDA, or the vocabulary is split.
    """
    module, package = LOSS_KERNELS[kernel]
    if not module:
        return
    hint = "use loss_kernel='torch' with chunked_loss=1024"
    if tp > 1:
        raise ValueError(f"loss_kernel={kernel!r} needs the whole vocabulary on each rank, but tp={tp}; {hint}")
    if device_type != "cuda":
        raise ValueError(f"loss_kernel={kernel!r} runs on CUDA, and the mesh is on {device_type!r}; {hint}")
    if find_spec(module) is None:
        raise ValueError(f"loss_kernel={kernel!r} needs the package {package}: pip install {package}; or {hint}")


def fused_loss_sum(
    kernel: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Sums the losses of ``targets`` [tokens], from ``hidden`` [tokens, hidden] and ``weight`` [vocab, hidden].

    Raises:
        ValueError: for label smoothing that is not a share, or that the kernel does not have.
    """
    check_smoothing(label_smoothing)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    if kernel == "liger":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(
            hidden,
            weight.to(hidden.dtype),
            targets,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )
    if label_smoothing:
        raise ValueError(f"loss_kernel={kernel!r} has no label smoothing; use loss_kernel='torch' or 'liger'")
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(
        hidden, weight.to(hidden.dtype), targets, bias=bias, ignore_index=ignore_index, reduction="sum"
    )
