"""Runs code in float64 that asks for float32 by name, as softmax, norms and recurrent mixers of transformers do."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode


@contextmanager
def in_float64() -> Generator[None, None, None]:
    """Within this context float64 is the default dtype, and every call that names float32 gets float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def as_written() -> Generator[None, None, None]:
    """Within this context calls that name float32 get it, too: what reads files counts the bytes of their numbers."""
    _as_written.append(True)
    try:
        yield
    finally:
        _as_written.pop()


_as_written: list[bool] = []


class _Widen(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _as_written:
            return func(*args, **(kwargs or {}))
        if func is Tensor.backward:
            with self:  # a mode is off while it handles a call, and recomputations run in this one
                return _run_backward(args[0])
        if func is Tensor.float:
            func = Tensor.double
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _grouped_mm(*args, **(kwargs or {}))
        if func in _REINTERPRET:
            return func(*args, **(kwargs or {}))
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _run_backward(loss: Tensor) -> None:
    """Differentiate a number; torch's public functions would turn the mode off again."""
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_REINTERPRET = (Tensor.view, torch.frombuffer)
"""Take bytes, those of a file, for numbers of the dtype that they have."""


def _grouped_mm(input: Tensor, weight: Tensor, *, offs: Tensor, bias: None = None, **_: torch.dtype) -> Tensor:
    """Products of the row groups of ``input`` that end at ``offs`` with one matrix each; torch has it up to float32."""
    assert bias is None, "torch has none, either"
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    groups = zip(input.split([*sizes, len(input) - sum(sizes)]), weight, strict=False)
    products = [rows @ matrix for rows, matrix in groups]
    rest = input.new_zeros(len(input) - sum(sizes), weight.shape[-1])
    return torch.cat([*products, rest])


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
