"""Sequence parallelism: between the children of a block, the residual stream is cut on the sequence over tp.

::

    whole --[split]--> block --> block --> ... --> last block --[gather]--> whole
                         |
        stream (slice) --+--> norm --> gather | attention, heads split | reduce-scatter --> + --> norm --> ...

What works on single tokens (norms, residual additions, dropout) sees a slice; its parameters have partial gradients.
What mixes tokens or is split over tp sees the whole sequence. Positions and masks stay those of the whole sequence,
because the stream is cut at the first block and not at the embedding. The states of the stream: :mod:`stream`.
"""

import inspect
import sys
from collections.abc import Collection
from functools import partial
from itertools import starmap, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightning_automodel._compat.torch.tensors import is_in_backward
from lightning_automodel.distributed.collectives import copy_in, gather, gather_in, reduce_out, scatter_out, split
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.chosen import skips_layers
from lightning_automodel.modules.forward import SharedByCopies, attributes_again, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import name_without_wrappers
from lightning_automodel.parallel.given_containers import Copied, changed, copies_of, with_originals
from lightning_automodel.parallel.lone_parts import is_called_alone
from lightning_automodel.parallel.tensor.beside import EnteringBeside, same_container
from lightning_automodel.parallel.tensor.origins import message_of_slice, message_within, note_entered
from lightning_automodel.parallel.tensor.stream import LENGTH, Stream, is_float
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS, ChildCollectives, SequenceLayout


def install_sequence_parallel(
    model: nn.Module, group: ProcessGroup, layout: SequenceLayout, own: Collection[str]
) -> dict[str, Stream]:
    """Puts the collectives of ``layout`` around blocks and their children.

    Args:
        model: whose parameters are split.
        group: of the tp axis.
        layout: of ``model``.
        own: split layers of users, if there are any: what enters may come from within another one.

    Returns:
        the stream that each block runs on, by the block's name.
    """
    streams: dict[str, Stream] = {}
    skips = skips_layers(model)  # any block may be the first or the last one that runs
    for blocks in layout.block_lists:
        stream = Stream(group, layout.beside)
        first, last = name_without_wrappers(blocks[0]), name_without_wrappers(blocks[-1])
        for name in blocks:  # of a block and its copies (modules_to_save) one runs
            streams[name] = stream
            place = name_without_wrappers(name)
            is_first, is_last = skips or place == first, skips or place == last
            block = model.get_submodule(name)
            why = message_of_slice(name, block, group.size())
            BlockOnStream(stream, name, why, is_first=is_first, is_last=is_last).install(block)
            for child, collectives in layout.children[name].items():
                module = model.get_submodule(child)
                within = message_within(child, module, group.size())
                entering = EnteringBeside(child, group, within) if own else None
                ChildOnStream(stream, child, collectives, (within, why), entering).install(module)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_hook(partial(_gather_recorded, group))
            module.register_forward_hook(partial(_tell_of_slices, list(streams.values())), always_call=True)
    return streams


def _gather_recorded(group: ProcessGroup, model: nn.Module, args: tuple, output: Any) -> Any:
    """Make hidden states whole that transformers has recorded of blocks, when they leave ``model``."""
    if isinstance(output, ModelOutput):
        for key, value in list(output.items()):
            output[key] = _whole(group, value)
    elif isinstance(output, tuple):  # return_dict=False
        return tuple(_whole(group, value) for value in output)
    return output


def _whole(group: ProcessGroup, value: Any) -> Any:
    lengths = [getattr(x, LENGTH, None) for x in value] if isinstance(value, tuple) else []
    if not any(lengths):
        return value
    return tuple(gather(x, 1, length, group) if length else x for x, length in zip(value, lengths, strict=True))


def _tell_of_slices(streams: list[Stream], model: nn.Module, args: tuple, output: Any) -> None:
    """Add to an error in the code of blocks what it may come from, where their stream was cut."""
    error = sys.exception()
    if type(error) is not RuntimeError:  # none, memory, a collective
        return
    for stream in streams:
        if stream.running and stream.length:
            stream.running = False
            error.add_note(
                f"sequence parallelism has cut the stream of {stream.length} tokens: if sizes do not fit above, the "
                "code of a block computes with values of all of them; use sequence_parallel=False"
            )


# ---- blocks ----------------------------------------------------------------------------------------------------------


class BlockOnStream(SharedByCopies):
    """The hooks around one block: the first cuts the stream, the last gathers it, those between hand it on.

    Args:
        stream: that the block runs on.
        name: of the block.
        why: no loss may read a slice of the stream.
        is_first: it receives the whole stream.
        is_last: it returns the whole stream.
    """

    def __init__(self, stream: Stream, name: str, why: str, *, is_first: bool, is_last: bool) -> None:
        self.stream, self.name, self.why, self.is_first, self.is_last = stream, name, why, is_first, is_last
        self.arguments: list[str] = []
        self.cut_names: set[str] = set()

    def install(self, block: nn.Module) -> None:
        """Run these hooks in every forward pass of ``block``, and on the same stream in its recomputations."""
        self.arguments = list(inspect.signature(block.forward).parameters)
        self.cut_names = {self.arguments[0], *STREAM_ARGUMENTS}
        block.register_forward_pre_hook(self.enter, with_kwargs=True)
        block.register_forward_hook(self.leave)
        keep_for_recomputation(block, attributes_again(self.stream, "length", "batch", "width", "is_alone"))

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Cut what enters whole: the stream, and what arrives beside it token by token (per-layer inputs)."""
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        self._read_length(block, given[self.arguments[0]])
        self._check_beside(block, given)
        first = tuple(starmap(self._cut, zip_longest(self.arguments[: len(args)], args, fillvalue="")))
        return first, {name: self._cut(name, x) for name, x in kwargs.items()}

    def _read_length(self, block: nn.Module, value: Tensor) -> None:
        """Find how long the whole sequence is: the first block counts, the others read what the one before noted."""
        stream, known = self.stream, getattr(value, LENGTH, None)
        if not is_in_backward():
            stream.is_alone = is_called_alone(block)
        if stream.is_alone:
            stream.length = None
        elif self.is_first and known is None:
            stream.running, stream.length = True, stream.length_of(value)
            stream.batch, stream.width = value.shape[0], value.shape[-1]
            _warn_of_other_streams(stream, self.name, value)
        elif hasattr(value, LENGTH):
            stream.length = known
        elif not stream.running:
            raise ValueError(_unknown_length(block))

    def _check_beside(self, block: nn.Module, given: dict[str, Any]) -> None:
        name = self.stream.resembling({n: x for n, x in given.items() if n not in self.cut_names})
        if name is None:
            return
        if not self.is_first:
            raise ValueError(_cannot_tell(block, name, self.stream))
        self.stream.length = None

    def _cut(self, name: str, x: Any) -> Any:
        stream = self.stream
        if name not in self.cut_names or not stream.is_whole(x) or stream.is_slice(x):
            return x
        part = note_entered(split(x, 1, stream.group), self.why)
        setattr(part, LENGTH, stream.length)  # transformers may record it
        return part

    def leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        """Gather the stream behind the last block; note its length on what goes to another."""
        outputs = output if isinstance(output, tuple | list) else (output,)
        if self.is_last:
            outputs = same_container(outputs, map(self._gather, outputs))
            self.stream.length, self.stream.running = None, False
        else:
            self.stream.mark(outputs)
        return outputs if isinstance(output, tuple | list) else outputs[0]

    def _gather(self, x: Any) -> Any:
        length = self.stream.length
        if length is None or not self.stream.is_slice(x):
            return x
        setattr(x, LENGTH, length)  # transformers may have recorded it
        return gather(x, 1, length, self.stream.group)


def _warn_of_other_streams(stream: Stream, block: str, value: Tensor) -> None:
    """Warn once of a stream that has no sequence to cut; compiled graphs have no room for warnings."""
    if not stream.has_tokens(value) and not torch.compiler.is_compiling():
        warn_once(
            f"sequence_parallel=True has no effect on {block} and the blocks behind it: what enters is "
            f"{list(value.shape)}, and only a residual stream [batch, seq, features] is cut; it stays whole, and exact"
        )


# ---- children --------------------------------------------------------------------------------------------------------


class ChildOnStream(SharedByCopies):
    """The hooks around a child of a block that sees the whole sequence: they gather what enters and cut what leaves.

    Args:
        stream: that the block runs on.
        name: of the child.
        collectives: which of them the child takes.
        why: no loss may read what is computed inside, and none a slice of what leaves.
        entering: copies in what is whole, where not all is.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        collectives: ChildCollectives,
        why: tuple[str, str],
        entering: EnteringBeside | None,
    ) -> None:
        self.stream, self.name, self.collectives, self.entering = stream, name, collectives, entering
        self.why_within, self.why_of_slice = why
        self._copied: list[Copied] = []

    def install(self, child: nn.Module) -> None:
        """Run these hooks in every forward pass of ``child``."""
        # Before the hooks of its style: what a style cuts or sums are values of the whole sequence.
        child.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        if not self.collectives.gives_features:
            child.register_forward_hook(self.leave, with_kwargs=True)

    def enter(self, child: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather every slice among the arguments, and copy in the others where gradients are partial sums."""
        flat = self.stream.runs_flat(args, kwargs, whole=False)
        first = tuple(self._enter(x, flat, str(place)) for place, x in enumerate(args))
        others = {name: self._enter(x, flat, name) for name, x in kwargs.items()}
        if self.entering and not torch.compiler.is_compiling():
            self._copied = copies_of([*args, *kwargs.values()], [*first, *others.values()])
        return first, others

    def _enter(self, value: Any, flat: bool, place: str) -> Any:
        return changed(value, lambda x, at: self._enter_tensor(x, flat, at), place)

    def _enter_tensor(self, value: Tensor, flat: bool, place: str) -> Tensor:
        if flat and self.stream.is_flat_slice(value):
            return self._gather(self.stream.unflatten(value, whole=False)).flatten(0, 1)
        if self.stream.is_slice(value):
            return self._gather(value)
        if not self.collectives.sums_gradients or not is_float(value):
            return value
        if self.entering:
            return self.entering.copy(value, place)
        return note_entered(copy_in(value, self.stream.group), self.why_within)

    def _gather(self, value: Tensor) -> Tensor:
        assert self.stream.length is not None
        if not self.collectives.sums_gradients:
            return gather(value, 1, self.stream.length, self.stream.group)
        return note_entered(gather_in(value, 1, self.stream.length, self.stream.group), self.why_within)

    def leave(self, child: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Cut the output; of several, the first is the stream, and the others are cut where they are like it."""
        if not torch.compiler.is_compiling():
            copied, self._copied = self._copied, []
            output = with_originals(output, copied)
            for container in copied:
                container.give_back()
        if not isinstance(output, tuple | list):
            return self._leave(output)
        flat = self.stream.runs_flat(args, kwargs, whole=True)
        return same_container(output, (self._leave(output[0]), *(self._leave_beside(x, flat) for x in output[1:])))

    def _leave(self, value: Any) -> Any:
        if self.stream.is_whole(value):
            return self._cut(value)
        if is_float(value) and value.ndim == 2 and self.stream.is_flat(value):
            return self._cut_flat(value)
        if self.collectives.sums_output and self.stream.length is None:
            return reduce_out(value, self.stream.group)
        if self.collectives.sums_output:
            raise ValueError(_cannot_cut(self.name, value, self.stream))
        return value

    def _leave_beside(self, value: Any, flat: bool) -> Any:
        if self.collectives.sums_output:
            return value
        if self.stream.is_whole(value):
            return self._cut(value)
        return self._cut_flat(value) if flat and self.stream.is_flat(value) else value

    def _cut(self, value: Tensor) -> Tensor:
        cut = scatter_out if self.collectives.sums_output else split
        return note_entered(cut(value, 1, self.stream.group), self.why_of_slice)

    def _cut_flat(self, value: Tensor) -> Tensor:
        return self._cut(self.stream.unflatten(value, whole=True)).flatten(0, 1)


# ---- messages --------------------------------------------------------------------------------------------------------


def _cannot_cut(name: str, value: Any, stream: Stream) -> str:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return (
        f"sequence parallelism cannot cut the output of {name} ({shape}) on a sequence of {stream.length} tokens; "
        "use sequence_parallel=False"
    )


def _cannot_tell(block: nn.Module, name: str, stream: Stream) -> str:
    return (
        f"sequence parallelism cannot tell {name}, which enters a {class_names(block)[0]} but not the first block, "
        f"from a slice of the {stream.length} tokens; pad the tokens to another length, or use sequence_parallel=False"
    )


def _unknown_length(block: nn.Module) -> str:
    return (
        f"a {class_names(block)[0]} runs outside of its model's forward pass and cannot know how long the sequence is: "
        "activation checkpointing with sequence_parallel=True needs use_reentrant=False"
    )
