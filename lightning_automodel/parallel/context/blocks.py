"""The residual stream between blocks, on a rank's rows: hooks around blocks and their children."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_automodel.modules.forward import Context, Snapshot, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.activation_checkpoint import is_checkpointed
from lightning_automodel.parallel.context.attention import bind_attention, exchanges, rows_of
from lightning_automodel.parallel.context.state import Stream
from lightning_automodel.plans.context import ROWS_OF_ATTENTION, ContextLayout, Treatment, ordered_arguments
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS

# ---- blocks ----------------------------------------------------------------------------------------------------------


def install_on_blocks(model: nn.Module, stream: Stream, layout: ContextLayout) -> None:
    """Cut the stream where it enters a block whole; must run before hooks that cut further are installed."""
    for name in stream.entry.blocks:
        block = model.get_submodule(name)
        attention = [model.get_submodule(child) for child in layout.attention_of(name)]
        is_first, gathered = name == stream.entry.blocks[0], name in layout.gathered_blocks
        enter = _enter_block(stream, block, attention, is_first=is_first, gathered=gathered)
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(lambda *_: stream.stop_drawing(), always_call=True)
        keep_for_recomputation(block, _stream_again(stream))


def _enter_block(
    stream: Stream, block: nn.Module, attention: list[nn.Module], *, is_first: bool, gathered: bool
) -> Callable:
    """Cut the stream, and the masks and tables beside it, outside of what a recomputation runs again."""
    names = ordered_arguments(block)
    streams = {names[0], *STREAM_ARGUMENTS}

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        first = args[0] if args else kwargs[names[0]]
        if is_first and stream.call.depth and (stream.rows is None or stream.whole_dim(first) is not None):
            stream.begin(first)
        if stream.rows is None:
            return None
        enter = stream.join if gathered else stream.cut
        if module.training and not gathered:
            stream.draw_for_rows()
        stream.block, stream.is_checkpointed = module, is_checkpointed(module)
        on_rows = bool(attention) and all(map(exchanges, attention))

        def mapped(name: str, value: Any) -> Any:
            if name == "attention_mask" and on_rows and stream.call.exchange != "all_to_all":
                stream.prepare_mask(value)
            elif name in ROWS_OF_ATTENTION and name != "attention_mask" and on_rows:
                return rows_of(value, name, stream, module)
            return enter(value) if name in streams else value

        return tuple(map(mapped, names, args)), {name: mapped(name, value) for name, value in kwargs.items()}

    return hook


def _stream_again(stream: Stream) -> Snapshot:
    """Restore the stream as it was where the backward pass runs a single block again."""

    def snapshot(block: nn.Module) -> Context:
        then = stream.rows, stream.batch, stream.masks, stream.is_checkpointed

        @contextmanager
        def again() -> Generator[None, None, None]:
            now = stream.rows, stream.batch, stream.masks, stream.is_checkpointed
            stream.rows, stream.batch, stream.masks, stream.is_checkpointed = then
            try:
                yield
            finally:
                stream.rows, stream.batch, stream.masks, stream.is_checkpointed = now

        return again

    return snapshot


def _map_first(function: Callable[[Any], Any], output: Any) -> Any:
    """Apply ``function`` to all of an output that is a tensor or a flat tuple or list of some."""
    return type(output)(map(function, output)) if isinstance(output, tuple | list) else function(output)


# ---- children --------------------------------------------------------------------------------------------------------


def install_on_children(model: nn.Module, stream: Stream, layout: ContextLayout) -> None:
    """Gather and cut around children, and behind blocks; must run after hooks that gather further are installed."""
    for name in stream.entry.blocks:
        block = model.get_submodule(name)
        if name in layout.gathered_blocks:
            block.register_forward_hook(lambda module, args, output: _map_first(stream.cut, output))
        if name in stream.entry.gathered_after:
            block.register_forward_hook(lambda module, args, output: _map_first(stream.join, output))
        for child, treatment in layout.children.items():
            if child.startswith(f"{name}."):
                _install_child(model.get_submodule(child), treatment, stream)


def _install_child(module: nn.Module, treatment: Treatment, stream: Stream) -> None:
    if treatment is Treatment.ATTENTION:
        bind_attention(module, stream)

    def is_gathered(module: nn.Module) -> bool:
        return stream.rows is not None and not (treatment is Treatment.ATTENTION and exchanges(module))

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return _enter_gathered(stream, module, args, kwargs) if is_gathered(module) else None

    def leave(module: nn.Module, args: tuple, output: Any) -> Any:
        return _map_first(stream.cut, output) if is_gathered(module) else output

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, prepend=True)


def _enter_gathered(stream: Stream, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Gather everything that holds this rank's rows; masks and positions are whole anyway."""
    joined = tuple(map(stream.join, args)), {name: stream.join(value) for name, value in kwargs.items()}
    first = next(iter((*joined[0], *joined[1].values())), None)
    if stream.whole_dim(first) is None:
        shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(
            f"context parallelism cannot tell the sequence in what enters a {class_names(module)[0]} ({shape}); "
            "use cp=1"
        )
    return joined
