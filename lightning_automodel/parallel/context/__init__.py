"""Context parallelism: the residual stream of a model is cut on the sequence over the axis ``cp``.

::

    ids, masks, positions, labels: whole on every rank, so the model's own code is right as it is
      --[cut at the first block]--> blocks on a rank's rows --> norm, head, loss on rows --[sum over cp]--> loss

``plans/context.py`` says what each child of a block needs; ``blocks.py`` does it with hooks around blocks and children,
``models.py`` with hooks around models, whose outputs are whole; ``attention.py`` exchanges keys and values.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.logs import log, warn_once
from lightning_automodel.modules.structure import class_names, outermost
from lightning_automodel.parallel.context.blocks import install_on_blocks, install_on_children
from lightning_automodel.parallel.context.models import install_on_models
from lightning_automodel.parallel.context.state import Pass, StreamOnRows
from lightning_automodel.parallel.guards.hooks_of_users import warn_of_parts
from lightning_automodel.plans.context import BlockList, ContextLayout, Treatment, head_of

__all__ = ["ContextParallel"]

_RETURNED = "Values that the caller of the model gives and gets"


class ContextParallel:
    """Cuts the sequence of one model: hooks around blocks before tensor parallelism is applied, the rest afterwards.

    A block cuts over cp before sequence parallelism cuts over tp; a child is gathered over tp before it is over cp.

    Args:
        model: changed in place.
        group: ranks of the axis.
        layout: of ``model``.
        balanced: rows from the front and the back for each rank, as causal attention needs.
        exchange: what attention does: "gather" (keys and values), "all_to_all" (heads), or "auto", what moves less.
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, layout: ContextLayout, balanced: bool, exchange: str
    ) -> None:
        self.model, self.layout = model, layout
        self.call = Pass(group, balanced, exchange)
        self.streams = [StreamOnRows(self.call, entry) for entry in layout.lists]
        _tell_found(model, layout, group.size())
        _tell_cost(model, layout, group.size())
        seeing_rows = list(dict.fromkeys(name for entry in layout.lists for name in _seeing_rows(model, layout, entry)))
        warn_of_parts(model, seeing_rows, f"cp={group.size()}", whole=(_RETURNED, f"Gradients of {_RETURNED.lower()}"))

    def install_outside(self) -> None:
        """Put the hooks around blocks."""
        for stream in self.streams:
            install_on_blocks(self.model, stream, self.layout)

    def install_inside(self) -> None:
        """Put the hooks around children of blocks and around models."""
        for stream in self.streams:
            install_on_children(self.model, stream, self.layout)
        install_on_models(self.model, self.call, self.streams, self.layout)


def _tell_found(model: nn.Module, layout: ContextLayout, ranks: int) -> None:
    """Log what was found in the code of a class, which another release of transformers may spell anew."""
    exchanging = [name for name, treatment in layout.children.items() if treatment is Treatment.ATTENTION]
    classes = sorted({type(model.get_submodule(name)).__name__ for name in exchanging}) or ["none"]
    rows = "rows" if layout.models and all(layout.models.values()) else "the whole sequence"
    log(
        f"cp={ranks}: by its code, attention of {class_names(model)[0]} that works on rows is {', '.join(classes)} "
        f"({len(exchanging)} modules), and the head gets {rows}"
    )


def _tell_cost(model: nn.Module, layout: ContextLayout, ranks: int) -> None:
    if not layout.lists:
        warn_once(
            f"cp={ranks} saves nothing for {class_names(model)[0]}: it has no list of blocks that runs on rows of a "
            "sequence (encoders with decoders and models of other libraries have none); it stays whole, and exact"
        )
    names = sorted({type(model.get_submodule(name)).__name__ for name in layout.gathered})
    if names:
        warn_once(
            f"cp={ranks}: {', '.join(names)} of {class_names(model)[0]} see the whole sequence on every rank, because "
            f"tokens may meet there beside transformers' attention functions: exact, at {ranks} times the work of "
            "these modules and with the activations of one device (activation_checkpointing keeps few of them)"
        )


def _seeing_rows(model: nn.Module, layout: ContextLayout, entry: BlockList) -> Iterator[str]:
    """Find the modules whose inputs or outputs are a rank's rows: from the first block on, but for what is gathered."""
    prefix = f"{entry.holder}." if entry.holder else ""
    names = [name for name, _ in model.named_modules() if name.startswith(prefix)]
    for name in names[names.index(entry.blocks[0]) :]:
        whole = outermost(layout.gathered, name)
        is_behind = outermost(entry.blocks, name) is None
        if (whole is None or whole == name) and not (is_behind and entry.blocks[-1] in entry.gathered_after):
            yield name
    yield entry.holder
    if layout.models and all(layout.models.values()) and (head := head_of(model)) is not None:
        yield from (name for name, module in model.named_modules() if module is head)
