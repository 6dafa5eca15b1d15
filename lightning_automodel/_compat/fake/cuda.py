"""Private names of torch by which its own code, autograd and FSDP2, believes in a device that is only played."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

ASKS_DEVICE = torch.ops.prim.device.default
CPU = torch.device("cpu")


def device_for_kernels(args: Any) -> torch.device:
    """Answers torch's own code where a fake tensor lies: it has kernels and streams for the CPU in every build."""
    return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else CPU


def keep_where_it_is(out: Any, args: tuple) -> None:
    """Correct the device of results that torch composed of others, as RMSNorm's in builds for CUDA."""
    strays = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, FakeTensor)]
    strays = [x for x in strays if x.fake_device == CPU]
    if strays and all(x.fake_device != CPU for x in tree_leaves(args) if isinstance(x, FakeTensor)):
        for stray in strays:
            stray.fake_device = torch.device("cuda", 0)


@contextmanager
def told_to_autograd() -> Generator[None, None, None]:
    """Let autograd take fake tensors for tensors on the CPU: for others it wants streams, which a driver makes."""
    original = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: type, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return device_for_kernels(args) if func is ASKS_DEVICE else original(cls, func, types, args, kwargs)

    handlers = fake_tensor._DISPATCH_META_HANDLERS
    before = handlers[ASKS_DEVICE]
    handlers[ASKS_DEVICE] = device_for_kernels
    FakeTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        handlers[ASKS_DEVICE] = before
        FakeTensor.__torch_dispatch__ = classmethod(original)  # type: ignore[assignment,method-assign]


class Event:
    """An event of a stream that does everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """The only stream."""

    stream_id = device_index = 0
    device_type = 1  # of CUDA, as torch numbers kinds of devices

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None: ...


@contextmanager
def without_cuda() -> Generator[None, None, None]:
    """Replace what FSDP2 and transformers call of the driver: one stream does everything in order."""
    only = Stream()
    calls: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: only,
        "get_device_capability": lambda device=None: (9, 0),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
    }
    with ExitStack() as stack:
        for name, value in calls.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        # FSDP2 asks here where it has gathered a unit ahead to which the backward pass does not come.
        stack.enter_context(replaced(torch.accelerator, "current_stream", calls["current_stream"]))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    """Put ``value`` in the place of an attribute within this context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
