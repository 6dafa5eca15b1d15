"""Types the results of operations on sums over ranks: which keep a sum a sum, by which :mod:`partial_sums` follows
values.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from numbers import Number
from typing import Any

from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_leaves

IsZero = Callable[[Tensor], bool]

_ATTRIBUTE = "_kind_in_sum_over_ranks"


class Kind(Enum):
    """What a value is that is not the same on all ranks, or that has no value yet."""

    PARTIAL = auto()
    """a term of a sum over the ranks"""
    ROW = auto()
    """a matrix, or a part of one, that turns slices into such terms"""
    UNKNOWN = auto()
    """memory that a kernel will write to"""


class NotASumError(Exception):
    """Raised for an operation on a term of a sum that gives no term; says in words what it does."""


class NotLinearError(NotASumError):
    """Raised for an operation that is not among the linear ones; no harm if it gives no tensor."""


def kind(value: Any) -> Kind | None:
    """Returns the kind of a tensor that was marked; ``None`` for all others."""
    return getattr(value, _ATTRIBUTE, None)


def mark(value: Tensor, found: Kind | None) -> None:
    """Gives a tensor its kind, or takes it away."""
    if found is not None:
        setattr(value, _ATTRIBUTE, found)
    elif kind(value) is not None:
        delattr(value, _ATTRIBUTE)


def tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested containers."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


_ADDS = "adds to it what every rank has"
_CREATE = {
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_tensor"),
}
_ALLOCATE = {"empty", "empty_like", "new_empty", "empty_strided"}
_MOVE = {  # elements of one tensor, or all of its dtype
    *("view", "view_as", "reshape", "reshape_as", "permute", "transpose", "t", "swapaxes", "swapdims", "movedim"),
    *("flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "contiguous", "clone"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "cpu", "cuda", "detach", "narrow", "select"),
    *("index_select", "__getitem__", "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "gather"),
    *("take_along_dim", "take_along_axis", "roll", "flip", "repeat", "repeat_interleave", "tril", "triu", "diagonal"),
    *("requires_grad_", "retain_grad", "register_hook", "__get__", "__set__", "__deepcopy__", "zero_", "squeeze_"),
    *("unsqueeze_", "moveaxis", "adjoint", "masked_select", "unfold", "as_strided", "record_stream", "pin_memory"),
    *("ravel", "hsplit", "vsplit", "dsplit", "fliplr", "flipud", "rot90", "atleast_1d", "atleast_2d", "atleast_3d"),
}
_ADD_UP = {"sum", "mean", "cumsum", "neg", "__neg__", "negative", "positive", "__pos__", "trace"}
_DROP = {"dropout", "dropout_", "feature_dropout", "dropout1d", "dropout2d", "dropout3d"}  # ranks draw the same mask
_ADD = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "subtract", "__sub__", "__rsub__", "__isub__"}
_JOIN = {
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "index_add", "index_add_", "index_copy"),
    *("index_copy_", "index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "copy_"),
    *("masked_scatter", "masked_scatter_", "block_diag"),
}
_FILL = {"__setitem__", "where", "masked_fill", "masked_fill_", "pad", "fill_"}
_MULTIPLY = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_DIVIDE = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_WITH_BIAS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_PRODUCT = _WITH_BIAS | {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "einsum", "tensordot"),
    *("_grouped_mm", "grouped_mm", "inner", "outer", "dot"),
}
_ADD_PRODUCT = {"addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addmv"}
_WRITE = {"copy_", "fill_", "zero_"}
_READ = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "equal", "allclose"}


def kind_of_result(name: str, args: tuple, kwargs: dict[str, Any], is_zero: IsZero) -> Kind | None:
    """Computes the kind of what the operation ``name`` gives.

    Args:
        name: of a function or method of torch.
        args: its operands.
        kwargs: its operands by name.
        is_zero: whether a value that every rank has is nothing but zeros, and always will be.

    Raises:
        NotASumError: if it makes of a rank's term what is no term of a sum.
    """
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    operands = list(tensors((args, kwargs)))
    kinds = {kind(x) for x in operands}
    if name in _ALLOCATE:
        return Kind.UNKNOWN
    if name in _CREATE or kinds <= {None}:
        return None
    if name in _PRODUCT or name in _ADD_PRODUCT:
        return _of_product(name, args, kwargs, is_zero)
    if Kind.PARTIAL in kinds:
        _check_partial(name, args, kwargs, is_zero)
        return Kind.PARTIAL
    if Kind.ROW in kinds:
        return Kind.ROW if name in _MOVE or name in _MULTIPLY or name in _DIVIDE else Kind.UNKNOWN
    return None if name in _WRITE else Kind.UNKNOWN


def _check_partial(name: str, args: tuple, kwargs: dict[str, Any], is_zero: IsZero) -> None:
    operands = [x for x in tensors((args, kwargs)) if x.is_floating_point()]
    single = sum(kind(x) is Kind.PARTIAL for x in operands) == 1
    if name in _ADD or name in _JOIN or name in _FILL:
        numbers = [] if name in _JOIN else _numbers(name, args, kwargs)
        if any(_counts(x, is_zero) for x in (*numbers, *operands)):
            raise NotASumError(_ADDS if name in _ADD or "add" in name else "puts beside it what every rank has")
    elif name in _MULTIPLY:
        if not single:
            raise NotASumError("multiplies such terms with each other")
    elif name in _DIVIDE:
        if not single or kind(args[0]) is not Kind.PARTIAL or kwargs.get("rounding_mode"):
            raise NotASumError("divides by it, or rounds")
    elif name in _READ:
        raise NotASumError("reads its value")
    elif name not in _MOVE | _ADD_UP | _DROP:
        raise NotLinearError("is not a linear function of it")


def _of_product(name: str, args: tuple, kwargs: dict[str, Any], is_zero: IsZero) -> Kind:
    """Computes the kind of ``a @ b + c``, of which ``c`` may lack."""
    if name in _ADD_PRODUCT:
        added, factors = args[0], args[1:]
    else:
        added = (args[2] if len(args) > 2 else kwargs.get("bias")) if name in _WITH_BIAS else None
        factors = (args[:2], {k: v for k, v in kwargs.items() if k != "bias"}) if name in _WITH_BIAS else (args, kwargs)
    kinds = [kind(x) for x in tensors(factors)]
    partial = kinds.count(Kind.PARTIAL)
    if partial > 1:
        raise NotASumError("multiplies such terms with each other")
    if not partial and Kind.ROW not in kinds:
        if kind(added) is Kind.PARTIAL:
            raise NotASumError(_ADDS)
        return Kind.UNKNOWN
    if added is not None and _counts(added, is_zero):
        raise NotASumError(_ADDS)
    return Kind.PARTIAL


def _counts(value: Any, is_zero: IsZero) -> bool:
    """Tells whether a summand that every rank has changes the sum."""
    if isinstance(value, Tensor):
        return kind(value) not in (Kind.PARTIAL, Kind.UNKNOWN) and not is_zero(value)
    return value != 0


def _numbers(name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Picks the numbers among the summands; others say where."""
    start = {"__setitem__": 2, "pad": 3, "masked_fill": 2, "masked_fill_": 2}.get(name, 0)
    given = (*args[start:], *(kwargs[key] for key in ("value", "other") if key in kwargs))
    return [x for x in given if isinstance(x, Number)]
