"""Where parameters that Megatron-FSDP shards hang, and whether what hangs there is theirs.

::

    a place                 forward pass                       elsewhere
    norm._parameters        raw  (gathered, computes)          steps  (the optimizer's)
    the user's own tensor   an error: the library would put its own over it, or leave it there for good
"""

from collections.abc import Mapping

from torch import nn

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.parameter_swap import describe_replaced, stands_for_parameter

_WAY_OUT = "Write into the parameter itself, with torch.no_grad(): parameter.copy_(value)"


class Places:
    """Knows each place of each parameter, tied ones included.

    Args:
        root: holds all modules.
        raw: the parameters that compute, by name.
        steps: those that the optimizer has, by the same names.
    """

    def __init__(self, root: nn.Module, raw: Mapping[str, nn.Parameter], steps: Mapping[str, nn.Parameter]) -> None:
        self._root = root
        pairs = {id(p): (raw[name], steps[name]) for name in steps for p in (raw[name], steps[name])}
        tables = [own_parameters(module) for module in root.modules()]
        self._found = [(table, name, *pairs[id(p)]) for table in tables for name, p in table.items() if id(p) in pairs]

    def check(self) -> None:
        """Check that nobody has put another tensor into a place.

        Raises:
            ValueError: naming the first one.
        """
        for table, name, raw, steps in self._found:
            there = table.get(name)
            if there is not raw and there is not steps and not stands_for_parameter(there):
                models = (
                    m for m in self._root.children() if any(own_parameters(part) is table for part in m.modules())
                )
                raise ValueError(describe_replaced(next(models), table, name, _WAY_OUT))

    def put_raw(self) -> None:
        """Put the parameters that compute where somebody has put back the optimizer's (torch.func.functional_call)."""
        for table, name, raw, steps in self._found:
            if table.get(name) is steps:
                table[name] = raw
