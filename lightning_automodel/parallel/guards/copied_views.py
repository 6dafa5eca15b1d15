"""Says where a slice of a sharded parameter or gradient is a copy, into which users may write for nothing."""

from lightning_automodel._compat.dtensor.operations import tell_of_copied_views
from lightning_automodel.distributed.logs import warn_once


def warn_of_copied_views() -> None:
    """Warn, once for each kind of view, from now on."""
    tell_of_copied_views(_warn)


def _warn(operation: str) -> None:
    warn_once(
        f"{operation} of a sharded tensor is a copy of what all ranks hold: it can be read, and what is written "
        "into it is lost. To change rows, multiply the whole tensor by a mask: tensor.mul_(distribute_tensor(mask, "
        "tensor.device_mesh, tensor.placements, src_data_rank=None))"
    )
