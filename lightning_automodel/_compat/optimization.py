"""Private names of torch's optimizers and gradient scaler."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def leaves_steps_out(optimizer: Optimizer) -> bool:
    """Tells whether ``optimizer`` looks at ``found_inf`` on the device; torch's scaler asks the same attribute."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def no_step_hooks() -> dict[str, Any]:
    """Makes the attributes of a copy of an optimizer by which its steps call none of the original's hooks."""
    return {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}


class GradScaler(torch.amp.GradScaler):
    """torch's scaler with a method for what it overrides itself for its own sharding: unscaling."""

    def unscale(self, optimizer: Any, inverse: Tensor, found: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        """Divides the gradients of ``optimizer`` in place, and notes by device which overflowed."""
        return super()._unscale_grads_(optimizer, inverse, found, allow_fp16)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale(optimizer, inv_scale, found_inf, allow_fp16)
