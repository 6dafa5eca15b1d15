"""Recorded router logits of split layers: what goes to an auxiliary loss, whole on every rank, and its gradient."""

from typing import Any

from torch import Tensor, nn

from lightning_automodel._compat.transformers import recorded_outputs
from lightning_automodel.distributed.collectives import scale_gradient
from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.structure import class_names, outermost
from lightning_automodel.plans import Layout


def install_recorded_shares(model: nn.Module, tp: int, layout: Layout) -> None:
    """Scales the gradient of recorded router logits: they go to an auxiliary loss, which is whole on every rank,
    while gradients inside a boundary are summed over tp: the recorded value passes on ``1 / tp`` of its gradient.

    What the layer itself computes with stays as it is: one hook before transformers' and one after it.
    """
    found = list(recorded_outputs(model, "router_logits"))
    if found:
        log(f"{class_names(model)[0]}: transformers records router_logits of {len(found)} modules")
    for name, module, index in found:
        if outermost(layout.boundaries, name) is not None:
            _RecordedShare(index, tp).install(module)


class _RecordedShare:
    """The hooks before and after transformers' one, which records the output ``index`` of a module.

    ::

        output --[share]--> the same, with 1 / tp of its gradient --[transformers records it]--[unshare]--> output
    """

    def __init__(self, index: int, tp: int) -> None:
        self.index, self.factor = index, 1 / tp
        self.whole: Tensor | None = None
        """between the two hooks: what the layer computes with"""

    def install(self, module: nn.Module) -> None:
        """Run these hooks in every forward pass of ``module``."""
        module.register_forward_hook(self.share, prepend=True)
        module.register_forward_hook(self.unshare)

    def share(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put in place what is to be recorded."""
        self.whole = output[self.index] if isinstance(output, tuple) else output
        return self._put(output, scale_gradient(self.whole, self.factor))

    def unshare(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put back what was recorded and nothing else: in between, hooks of a boundary have reduced other outputs."""
        whole, self.whole = self.whole, None
        return self._put(output, whole)

    def _put(self, output: Any, value: Tensor | None) -> Any:
        if not isinstance(output, tuple):
            return value
        return tuple(value if i == self.index else x for i, x in enumerate(output))
