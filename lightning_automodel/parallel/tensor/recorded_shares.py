"""Router logits and attention maps that transformers records inside of split layers: whole values on every rank."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel._compat.transformers.models import recorded_outputs, recordings_of_call
from lightning_automodel.distributed.collectives import gather, scale_gradient
from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.structure import class_names, outermost
from lightning_automodel.parallel.tensor.beside import same_container
from lightning_automodel.plans import Layout

ROUTER_LOGITS, ATTENTIONS = "router_logits", "attentions"


def install_recorded_shares(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Makes of what is recorded inside of split layers what one process records, on every rank.

    * Router logits are whole, and go to an auxiliary loss that is whole on every rank, while gradients inside a
      boundary are summed over tp: the recorded value passes on ``1 / tp`` of its gradient.
    * Attention maps [batch, heads / tp, seq, seq] are gathered where a call asks for them.

    What the layer itself computes with stays as it is: one hook before transformers' and one after it.
    """
    found = list(recorded_outputs(model, ROUTER_LOGITS))
    if found:
        log(f"{class_names(model)[0]}: transformers records router_logits of {len(found)} modules")
    for name, module, index in found:
        if outermost(layout.boundaries, name) is not None:
            _Recorded(index, lambda x: scale_gradient(x, 1 / group.size())).install(module)
    for module, index in _split_attentions(model, layout):
        _Recorded(index, lambda x: _all_heads(x, group)).install(module)


def _all_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather(x, 1, x.shape[1] * group.size(), group) if ATTENTIONS in recordings_of_call() else x


def _split_attentions(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, int]]:
    """Find the modules with a rank's heads among those whose attention maps are recorded."""
    cut = [name for name, found in layout.parameters.items() if not found.placement.is_replicate()]
    for name, module, index in list(recorded_outputs(model, ATTENTIONS)):
        if any(parameter.startswith(f"{name}.") for parameter in cut):
            yield module, index


class _Recorded:
    """The hooks before and after transformers' one, which records the output ``index`` of a module.

    ::

        output --[change]--> another one --[transformers records it]--[restore]--> output

    Args:
        index: of the output, where there are several.
        function: makes what is to be recorded.
    """

    def __init__(self, index: int, function: Callable[[Tensor], Tensor]) -> None:
        self.index, self.function = index, function
        self.own: Tensor | None = None
        """between the two hooks: what the layer computes with"""

    def install(self, module: nn.Module) -> None:
        """Run these hooks in every forward pass of ``module``."""
        module.register_forward_hook(self.change, prepend=True)
        module.register_forward_hook(self.restore)

    def change(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put in place what is to be recorded."""
        value = output[self.index] if isinstance(output, tuple | list) else output
        if value is None:  # attention maps that its implementation does not have
            return output
        self.own = value
        return self._put(output, self.function(value))

    def restore(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put back what was recorded and nothing else: in between, hooks of a boundary have reduced other outputs."""
        own, self.own = self.own, None
        return output if own is None else self._put(output, own)

    def _put(self, output: Any, value: Tensor) -> Any:
        if not isinstance(output, tuple | list):
            return value
        return same_container(output, (value if i == self.index else x for i, x in enumerate(output)))
