"""Takes back ``torch.compile`` of a whole LightningModule, which Lightning allows for its own strategies only."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.compile import to_uncompiled

from lightning_automodel._compat.lightning.modules import is_compiled
from lightning_automodel.distributed.logs import warn_once


def uncompile(module: "pl.LightningModule | None") -> "pl.LightningModule | None":
    """Returns the module as it was before ``torch.compile(module)``: same object, same names."""
    if module is None or not is_compiled(module):
        return module
    warn_once(
        f"{type(module).__name__} was passed through torch.compile; it runs uncompiled, because a compiled graph of "
        "the whole module cannot be made parallel block by block"
    )
    return to_uncompiled(module)
