"""Tells of values where they come from, by their autograd graph: from within a split layer, or whole.

::

    loss --> sum over the ranks                                        whole: what is behind is not looked at
     |
     +-----> what a layer gives beside its sum, and refuses            an error with its message
     +-----> what entered a layer, or a rank's part of parameters      an error: no layer gave it, a hook saw it, say
     +-----> a slice of the stream                                     an error, too: nobody has gathered it
"""

from collections.abc import Container, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_automodel._compat.fsdp2.hooks import HANDS_ON, edges_behind
from lightning_automodel.modules.structure import outermost
from lightning_automodel.parallel.traces import refused
from lightning_automodel.plans import Layout
from lightning_automodel.plans.selection import wildcard

_REFUSED = "_RefusedBackward"
_ENTERED = ("_CopyInBackward", "_GatherInBackward")
_JOINED = "_GatherBackward"
_WHOLE_AGAIN = {
    _JOINED,
    "_ReduceOutBackward",
    "_ScatterOutBackward",
    "_SplitBackward",
    "_ScaleGradientBackward",
}
_COMPILED = "CompiledFunctionBackward"
_OF_BLOCKS = {_COMPILED, "CheckpointFunctionBackward"}
_LEAF = "AccumulateGrad"
_TELLING = {_REFUSED, *_ENTERED, *_WHOLE_AGAIN, "_LocalBackward", _LEAF}
_MIXING = {
    *("Mean", "Sum", "Prod", "Var", "Std", "Norm", "LinalgVectorNorm", "Logsumexp", "Softmax", "LogSoftmax"),
    *("Max", "Min", "Amax", "Amin", "Cumsum", "Cumprod", "Sort", "Topk", "Roll", "Flip"),
    *("Gather", "Index", "IndexSelect", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Dot", "Linear", "Convolution"),
    *("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "FusedRmsNorm"),
}
"""Operations that may compute across heads or features, as graphs call them."""
_SEEN = "_nothing_behind_is_of_a_rank"
_IS_PART, _MESSAGE = "_gradient_is_of_a_rank", "_why_a_loss_must_not_read_it"
_SPLIT: WeakSet[nn.Module] = WeakSet()


def note_part(value: Any, message: str | None = None) -> None:
    """Note that the gradient of what a node or a leaf gives is a rank's own, and why no loss may read it, if so."""
    setattr(value, _IS_PART, True)
    setattr(value, _MESSAGE, message)


def note_entered(value: Tensor, message: str | None) -> Tensor:
    """Note that a collective has given ``value`` to a split layer, or cut it; no loss may read what comes of it."""
    if torch.compiler.is_compiling() or message is None:
        return value
    if value.grad_fn is not None:
        setattr(value.grad_fn, _MESSAGE, message)
    return value


def was_computed_within(value: Tensor) -> bool | None:
    """Tell whether ``value`` comes from within a split layer, and let the gradient of what left it pass.

    Returns:
        nothing if it comes from a compiled block, of which the graph does not tell.
    """
    nodes, names, of_rank = [], set(), False
    for node, name in _nodes_within(value, but=_SEEN):
        nodes.append(node)
        names.add(name)
        of_rank |= getattr(_noted(node, name), _IS_PART, False)
        if name == _REFUSED:
            node.passes = True
    if _COMPILED in names:
        return None
    within = of_rank or not names.isdisjoint((*_ENTERED, _REFUSED))
    for node in [] if within else nodes:
        if type(node).__name__ not in HANDS_ON:  # each of its outputs is another value
            node.metadata[_SEEN] = True
    return within


def is_joined(value: Tensor) -> bool:
    """Tell whether ``value`` was joined of the parts of all ranks, as attention maps are: each has its own gradient."""
    return value.grad_fn is not None and value.grad_fn.name() == _JOINED


def comes_of(value: Tensor, source: Tensor) -> tuple[bool, bool]:
    """Tell whether ``value`` was computed of ``source``, and whether of others that have gradients, in one split layer.

    Of a graph that is compiled nothing is told.
    """
    if torch.compiler.is_compiling() or source.grad_fn is None:
        return False, False
    left, seen, comes, is_mixed = [value.grad_fn], {None, source.grad_fn}, False, False
    while left:
        node: Any = left.pop()
        comes |= node is source.grad_fn
        if node not in seen:
            seen.add(node)
            name = type(node).__name__
            is_mixed |= name in _ENTERED or name == _LEAF
            left += [before for before, _ in node.next_functions if name not in _ENTERED]
    return comes, is_mixed


def let_pass(value: Tensor) -> Tensor:
    """Let the gradient of a rank's part pass, which goes on to be joined with those of the others."""
    node: Any = value.grad_fn
    if node is not None and node.name() == _REFUSED:
        node.passes = True
    return value


def mixing_behind(value: Tensor) -> str | None:
    """Name an operation across heads or features that a part which left a split layer has gone through since."""
    left: list[tuple[Any, int, str]] = [(value.grad_fn, value.output_nr, "")]
    seen = set()
    while left:
        node, output, mixing = left.pop()
        name = type(node).__name__
        if node is None or name in _WHOLE_AGAIN or name in _ENTERED:
            continue
        if name == _REFUSED:
            if mixing:
                return mixing
            continue
        operation = name.partition("Backward")[0]
        mixing = mixing or (operation if operation in _MIXING else "")
        for edge in edges_behind(node, output):
            if (*edge, bool(mixing)) not in seen:
                seen.add((*edge, bool(mixing)))
                left.append((*edge, mixing))
    return None


def refused_if_slice(value: Tensor) -> Tensor:
    """Return ``value``, whose gradient is an error where it reads what split layers hand to each other, or compute."""
    why = _why_refused(value)
    return value if why is None else refused(value, why)


def note_split(model: nn.Module) -> None:
    """Note that layers of ``model`` are split."""
    _SPLIT.add(model)


def refuse_loss_of_slices(loss: Tensor) -> None:
    """Refuse a loss that reads what split layers compute, or hand to each other, past what their models return.

    As hooks collect it. Where another layer reads the same, its gradient is none to refuse.

    Raises:
        ValueError: if it does.
    """
    why = _why_refused(loss) if _SPLIT else None
    if why is not None:
        raise ValueError(why)


def _why_refused(value: Tensor) -> str | None:
    for node, name in _nodes_within(value, ends=_OF_BLOCKS):  # the passes before a graph was compiled told of it
        if name in _TELLING:
            why = node.message if name == _REFUSED else getattr(_noted(node, name), _MESSAGE, None)
            if why is not None:
                return why
    return None


def _noted(node: Any, name: str) -> Any:
    """Return what carries the notes of a node: the parameter itself where that is a leaf."""
    return node.variable if name == _LEAF else node


def _nodes_within(value: Tensor, but: str = "", ends: Container[str] = ()) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of the graph of ``value``, and their names, back to where values entered a split layer, or left
    one whole, or to nodes of other names that are ``ends``, ``but`` for what is behind nodes with such a note. In every
    pass: it is to be quick.
    """
    left: list[tuple[Any, int]] = [(value.grad_fn, value.output_nr)]
    seen = set(left)
    while left:
        node, output = left.pop()
        name = type(node).__name__
        is_end = name in _ENTERED or name in _WHOLE_AGAIN or name in ends
        if node is None or (name in _WHOLE_AGAIN and not hasattr(node, _MESSAGE)) or (but and but in node.metadata):
            continue
        yield node, name
        if not is_end:
            for edge in edges_behind(node, output) if name in HANDS_ON else node.next_functions:
                if edge not in seen:
                    seen.add(edge)
                    left.append(edge)


def messages_of_parameters(model: nn.Module, layout: Layout, tp: int) -> dict[str, str]:
    """Say of parameters, by name, why no loss may read them: those of split layers, and of users' models lone ones.

    Behind others there are collectives, or a loss of logits of which each rank has a part.
    """
    found, planned = {}, list(layout.modules)
    of_modules = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if outermost(planned, name) is not None
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer, is_whole = outermost(layout.boundaries, name), layout.parameters[name].placement.is_replicate()
        if layer is not None:
            found[name] = message_within(layer, model.get_submodule(layer), tp)
        elif layout.is_tried and not is_whole and id(parameter) not in of_modules:
            found[name] = _message_of_lone(name, tp)
    return found


def message_within(name: str, module: nn.Module, tp: int) -> str:
    """Say why no loss may read what is computed in a split layer, or with its parameters."""
    return (
        f"a loss reads what is computed inside of {name} ({type(module).__name__}), as a hook of a layer in it sees, "
        f"or its parameters: one of {tp} tp ranks has its own heads or features there, or all compute the same, "
        "and gradients would be summed. Return it beside the first output of that layer; or leave its layers whole, "
        f"with a rule 'replicate' for each of them ({wildcard(name)}.*) in "
        "FSDP2Config(tp_plan={'extends': 'model', ...})"
    )


def message_of_slice(name: str, module: nn.Module, tp: int) -> str:
    """Say why no loss may read the residual stream where it is cut on the sequence."""
    return (
        f"a loss reads what enters or leaves {name} ({type(module).__name__}), or what comes of it, and one of {tp} tp "
        "ranks has a slice of the sequence there (sequence_parallel=True): other numbers than one process has. Read "
        "what the model returns (output_hidden_states=True), or use sequence_parallel=False"
    )


def _message_of_lone(name: str, tp: int) -> str:
    return (
        f"a loss reads {name}, and one of {tp} tp ranks has its own part of it: other numbers than one process has. "
        "Only attention and feed-forward layers that are split may read it. Leave it whole, with a rule "
        f"{wildcard(name)!r}: 'replicate' in "
        "FSDP2Config(tp_plan={'extends': 'model', ...})"
    )
