"""Private names of torch's optimizers and gradient scaler."""

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer, _muon


def leaves_steps_out(optimizer: Optimizer) -> bool:
    """Tells whether ``optimizer`` looks at ``found_inf`` on the device; torch's scaler asks the same attribute."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def no_step_hooks() -> dict[str, Any]:
    """Makes the attributes of a copy of an optimizer by which its steps call none of the original's hooks."""
    return {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}


def orthogonalize_whole_matrices() -> None:
    """Let torch's Muon orthogonalize sharded matrices whole, from now on, on each rank that holds a part.

    DTensor takes every product of the iteration in parts: 11 to 27 messages a matrix in the place of one for each axis,
    and its sums of bfloat16, rounded in parts, come out a tenth of an update away from those of one process.
    """
    if not hasattr(_muon._zeropower_via_newtonschulz, "__wrapped__"):
        wrapped = functools.partial(_orthogonalize, _muon._zeropower_via_newtonschulz)
        _muon._zeropower_via_newtonschulz = functools.update_wrapper(wrapped, wrapped.func)


def _orthogonalize(function: Any, update: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(update, DTensor):
        return function(update, *args, **kwargs)
    narrow: Any = update.bfloat16()  # as which it computes
    whole = function(narrow.full_tensor(), *args, **kwargs)
    everywhere = [Replicate()] * update.device_mesh.ndim
    found = DTensor.from_local(whole, update.device_mesh, everywhere, run_check=False)
    return found.redistribute(placements=update.placements)


class GradScaler(torch.amp.GradScaler):
    """torch's scaler with a method for what it overrides itself for its own sharding: unscaling."""

    def unscale(self, optimizer: Any, inverse: Tensor, found: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        """Divides the gradients of ``optimizer`` in place, and notes by device which overflowed."""
        return super()._unscale_grads_(optimizer, inverse, found, allow_fp16)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale(optimizer, inv_scale, found_inf, allow_fp16)
