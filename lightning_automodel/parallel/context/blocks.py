"""The residual stream between blocks, on a rank's rows: hooks around blocks and their children."""

from collections.abc import Callable
from functools import partial
from itertools import starmap, zip_longest
from typing import Any

from torch import Tensor, nn

from lightning_automodel.modules.forward import SharedByCopies, attributes_again, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.activation_checkpointing.blocks import is_checkpointed
from lightning_automodel.parallel.context.attention import bind_attention, exchanges, rows_of
from lightning_automodel.parallel.context.state import StreamOnRows
from lightning_automodel.plans.context import ROWS_OF_ATTENTION, ContextLayout, Treatment, ordered_arguments
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS

# ---- blocks ----------------------------------------------------------------------------------------------------------


def install_on_blocks(model: nn.Module, stream: StreamOnRows, layout: ContextLayout) -> None:
    """Cut the stream where it enters a block whole; must run before hooks that cut further are installed."""
    for name in stream.entry.blocks:
        attention = [model.get_submodule(child) for child in layout.attention_of(name)]
        is_first, gathered = name == stream.entry.blocks[0], name in layout.gathered_blocks
        BlockOnRows(stream, attention, is_first=is_first, gathered=gathered).install(model.get_submodule(name))


class BlockOnRows(SharedByCopies):
    """The hooks around one block: they cut what enters whole, here, where no recomputation runs.

    Args:
        stream: that the block runs on.
        attention: modules inside of it whose attention exchanges keys or heads.
        is_first: the sequence of a call begins here.
        gathered: the block as a whole sees the whole sequence.
    """

    def __init__(self, stream: StreamOnRows, attention: list[nn.Module], *, is_first: bool, gathered: bool) -> None:
        self.stream, self.attention = stream, attention
        self.is_first, self.gathered = is_first, gathered
        self.arguments: list[str] = []
        self.stream_names: set[str] = set()

    def install(self, block: nn.Module) -> None:
        """Run these hooks in every forward pass of ``block``, and on the same rows in its recomputations."""
        self.arguments = ordered_arguments(block) or [STREAM_ARGUMENTS[0]]
        self.stream_names = {self.arguments[0], *STREAM_ARGUMENTS}
        block.register_forward_pre_hook(self.enter, with_kwargs=True)
        block.register_forward_hook(self.leave, always_call=True)
        keep_for_recomputation(
            block, attributes_again(self.stream, "rows", "batch", "beside", "row_masks", "masks", "is_checkpointed")
        )

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Cut the stream, and what attention on rows takes beside it."""
        begins = self._begin(args[0] if args else kwargs[self.arguments[0]])
        whole_mask = self.stream.whole_mask
        if self.stream.rows is None:
            return tuple(map(whole_mask, args)), {name: whole_mask(value) for name, value in kwargs.items()}
        if block.training and not self.gathered:
            self.stream.draw_for_rows()
        self.stream.block, self.stream.is_checkpointed = block, is_checkpointed(block)
        on_rows = bool(self.attention) and all(map(exchanges, self.attention))
        enter = partial(self._enter, block, on_rows)
        named = list(zip_longest(self.arguments[: len(args)], args, fillvalue=""))
        self.stream.note_beside([*named, *kwargs.items()], begins)
        return tuple(starmap(enter, named)), {name: enter(name, value) for name, value in kwargs.items()}

    def _begin(self, first: Any) -> bool:
        """Begin a sequence where this block is its first; tell whether it does."""
        stream = self.stream
        begins = (
            self.is_first and stream.call.depth > 0 and (stream.rows is None or stream.whole_dim(first) is not None)
        )
        if begins:
            stream.begin(first)
        return begins

    def _enter(self, block: nn.Module, on_rows: bool, name: str, value: Any) -> Any:
        if name == "attention_mask" and on_rows and self.stream.call.exchange != "all_to_all":
            self.stream.prepare_mask(value)
        elif name in ROWS_OF_ATTENTION and name != "attention_mask" and on_rows:
            return rows_of(value, name, self.stream, block)
        if self.gathered:
            return self.stream.whole_mask(self.stream.join(value))
        return self.stream.cut(value) if name in self.stream_names else value

    def leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        """Go on with random numbers that the ranks have in common."""
        self.stream.stop_drawing()


def _map_first(function: Callable[[Any], Any], output: Any) -> Any:
    """Apply ``function`` to all of an output that is a tensor or a flat tuple or list of some."""
    if hasattr(output, "_fields"):
        return type(output)(*map(function, output))
    return type(output)(map(function, output)) if isinstance(output, tuple | list) else function(output)


# ---- children --------------------------------------------------------------------------------------------------------


def install_on_children(model: nn.Module, stream: StreamOnRows, layout: ContextLayout) -> None:
    """Gather and cut around children, and behind blocks; must run after hooks that gather further are installed."""
    for name in stream.entry.blocks:
        block = model.get_submodule(name)
        if name in layout.gathered_blocks:
            block.register_forward_hook(lambda module, args, output: _map_first(stream.cut, output))
        if name in stream.entry.gathered_after:
            block.register_forward_hook(lambda module, args, output: _map_first(stream.join, output))
        for child, treatment in layout.children.items():
            if child.startswith(f"{name}."):
                ChildOnRows(stream, treatment).install(model.get_submodule(child))


class ChildOnRows(SharedByCopies):
    """The hooks around a child of a block: what must see the whole sequence gets it, attention exchanges instead.

    Args:
        stream: that the block runs on.
        treatment: of the child.
    """

    def __init__(self, stream: StreamOnRows, treatment: Treatment) -> None:
        self.stream, self.treatment = stream, treatment

    def install(self, child: nn.Module) -> None:
        """Run these hooks in every forward pass of ``child``."""
        if self.treatment is Treatment.ATTENTION:
            bind_attention(child, self.stream)
        child.register_forward_pre_hook(self.enter, with_kwargs=True)
        child.register_forward_hook(self.leave, prepend=True)

    def enter(self, child: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Gather everything that holds this rank's rows."""
        return _enter_gathered(self.stream, child, args, kwargs) if self._is_gathered(child) else None

    def leave(self, child: nn.Module, args: tuple, output: Any) -> Any:
        """Cut what leaves."""
        return _map_first(self.stream.cut, output) if self._is_gathered(child) else output

    def _is_gathered(self, child: nn.Module) -> bool:
        return self.stream.rows is not None and not (self.treatment is Treatment.ATTENTION and exchanges(child))


def _enter_gathered(stream: StreamOnRows, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Gather everything that holds this rank's rows, masks too; positions are whole anyway."""

    def join(value: Any) -> Any:
        return stream.whole_mask(stream.join(value))

    joined = tuple(map(join, args)), {name: join(value) for name, value in kwargs.items()}
    first = next(iter((*joined[0], *joined[1].values())), None)
    if stream.whole_dim(first) is None:
        shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(
            f"context parallelism cannot tell the sequence in what enters a {class_names(module)[0]} ({shape}); "
            "use cp=1"
        )
    return joined
