"""Private names of torch's tensors, operations and autograd."""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Documented ways to name and to watch operations, in modules with private names.
__all__ = ["OpOverload", "OpOverloadPacket", "TorchDispatchMode"]


class EagerMode(TorchDispatchMode):
    """A mode over operations of code that is not compiled: torch asks its compiler at each operation otherwise."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_functorch() -> AbstractContextManager:
    """Leave transforms of torch.func within this context: what it computes is no part of what they differentiate."""
    return torch._C._DisableFuncTorch() if is_transformed() else nullcontext()


def is_transformed() -> bool:
    """Tell whether this runs within transforms of torch.func (grad, vmap, jacrev)."""
    return torch._C._are_functorch_transforms_active()


def without_functions() -> Any:
    """Hides operations from modes of functions within this context; for code of a mode that only looks at tensors."""
    return torch._C.DisableTorchFunction()


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The product of several matrices at a time, which ``torch.nn.functional.grouped_mm`` runs."""

EACH_NORM = torch._foreach_norm
"""What torch's own clipping computes the norms of many tensors by."""

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def wrapper_tensor(kind: type[_Wrapper], shape: Any, **options: Any) -> _Wrapper:
    """Makes a tensor of a class of our own that has a shape and no memory; documented, under a private name."""
    return Tensor._make_wrapper_subclass(kind, shape, **options)


@contextmanager
def without_checkpointing_modes() -> Generator[None, None, None]:
    """Hides what runs within this context from selective checkpointing, which counts operations; other modes stay.

    torch can disable all modes only, those of fake tensors and of measurements among them.
    """
    caching = _CachingTorchDispatchMode | _CachedTorchDispatchMode
    with _popped() as modes, _pushed([mode for mode in modes if not isinstance(mode, caching)]):
        yield


@contextmanager
def without_modes() -> Generator[None, None, None]:
    """Hides what runs within this context from all that watches operations."""
    with _popped():
        yield


@contextmanager
def _popped() -> Generator[list[Any], None, None]:
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())][::-1]
    try:
        yield modes
    finally:
        for mode in modes:
            _push_mode(mode)


@contextmanager
def _pushed(modes: list[Any]) -> Generator[None, None, None]:
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def written_output(tensor: Tensor) -> Tensor:
    """Returns what the forward pass of an autograd function wrote in place, to be its output.

    In a compiled graph torch 2.11 gives such an output a gradient of zeros, unless it is a view; 2.13 does not.
    """
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor


def each_norm(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Computes the norm of each tensor, in one kernel where there is one; torch's own clipping does so."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor in place by a scalar tensor, in one kernel where there is one."""
    torch._foreach_mul_(tensors, factor)


def name_of_operation(operation: Any) -> str:
    """Returns the name of an operation in torch's schemas, such as ``aten::normal_``."""
    return operation._schema.name


def argument_of(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what an operation is called with as ``name``, or by default; ``None`` if it takes no such argument."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that ``view`` is a view of; only a private attribute says so."""
    return view._base


def version_of(tensor: Tensor) -> int:
    """Counts the writes to the memory of ``tensor``; autograd checks by it what it saved, and only privately."""
    return tensor._version


def let_last_hook_run_first(tensor: Tensor) -> None:
    """Let what ``register_hook`` was given last see gradients of ``tensor`` before what it was given earlier.

    A view would give it them first, too, but is no part of the graph of what was computed from ``tensor`` until now.
    """
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    *before, last = hooks.items()
    hooks.clear()
    hooks.update([last, *before])


_READS = "_reads_of_data"


def reads_of_data(tensor: Tensor) -> int:
    """Count from the first call on how often ``tensor.data`` was read; torch does not count what is written into it.

    The one that is read stays torch's: a tensor that counts its writes (``detach()``) is a view, into which autograd
    lets nobody write where a function of its own gave it.
    """
    _let_reads_of_data_count()
    setattr(tensor, _READS, reads := getattr(tensor, _READS, 0))
    return reads


@functools.cache
def _let_reads_of_data_count() -> None:
    data: Any = Tensor.data

    def read(tensor: Any) -> Any:
        if hasattr(tensor, _READS) and not torch.compiler.is_compiling():
            setattr(tensor, _READS, getattr(tensor, _READS) + 1)
        return data.__get__(tensor)

    read.__name__ = "data"  # what overrides functions of torch asks for the name
    Tensor.data = property(read, data.__set__)  # type: ignore[assignment]


def after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the running backward pass. FSDP2 does the same; there is no public way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Tell whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_accumulated_now(parameter: Tensor) -> bool:
    """Tell whether the running backward pass adds to ``parameter.grad``; one of ``torch.autograd.grad`` does not.

    torch tells its own hooks of several gradients, and only them.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad was asked for this very gradient
        return False


def assert_async(condition: Tensor, message: str) -> None:
    """Stop the program if ``condition`` is false, without waiting for the device, as torch checks class indices.

    Private, because it ruins the CUDA context; there is no public check without a synchronization.
    """
    torch._assert_async(condition, message)
