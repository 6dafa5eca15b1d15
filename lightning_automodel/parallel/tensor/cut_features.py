"""Refuses what computes across features that column-wise members of a boundary child give, of which a rank has some.

::

    up(x)                 features 0-3 | 4-7        on GPU 0 | 1
    gelu, a * b           each alone                right on slices
    softmax, norm, mean   across features 0-7       error: a rank would take those that it has for all

What cannot be computed at all on a part of the features or heads (with a table of all heads, by a convolution over all
channels) is an error that says so, too. A value is followed from the member on as long as its features stay the last
dimension and each is computed alone. What is viewed as heads, or moved, is not.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_automodel.plans.linearity import tensors
from lightning_automodel.plans.selection import layers_of, wildcard

_CUT = "_features_are_cut"
_ALONE = {
    *(
        "gelu",
        "silu",
        "relu",
        "relu_",
        "sigmoid",
        "tanh",
        "softplus",
        "leaky_relu",
        "elu",
        "mish",
        "hardswish",
        "relu6",
    ),
    *("dropout", "square", "pow", "sqrt", "rsqrt", "exp", "log", "abs", "clamp", "neg", "add", "sub", "mul", "div"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__pow__"),
    *("to", "float", "half", "bfloat16", "type_as", "contiguous", "clone", "where", "masked_fill"),
}
_ACROSS = {  # where the dimension stands among the arguments, and what it is without one
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod"), (1, -1)),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "prod", "median", "argmax", "argmin"), (1, None)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), (2, None)),
    **dict.fromkeys(("sort", "argsort", "flip"), (1, -1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (9, -1)),
    "topk": (2, -1),
    "normalize": (2, 1),
}


class CutFeatures(TorchFunctionMode):
    """Follows the features of the column-wise ``members`` through one forward pass of ``module``, called ``name``."""

    def __init__(self, name: str, module: nn.Module, members: list[nn.Module]) -> None:
        super().__init__()
        self._name, self._module, self._members, self._is_active = name, module, members, False

    def install(self) -> Iterator[RemovableHandle]:
        """Install hooks around the module, and behind its members."""
        yield self._module.register_forward_pre_hook(self._enter)
        yield self._module.register_forward_hook(self._leave, prepend=True, always_call=True)
        for member in self._members:
            yield member.register_forward_hook(_mark_output)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self.__enter__()
        self._is_active = True

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        cut: Tensor | None = next((x for x in tensors((args, kwargs)) if hasattr(x, _CUT)), None)
        if cut is not None and name in _ACROSS and args and args[0] is cut and _is_across(name, cut, args, kwargs):
            raise ValueError(self._message(name, "computes across features of which each rank has a part"))
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if type(error) not in (RuntimeError, IndexError):  # memory, a collective
                raise
            problem = f"cannot be computed on a rank's part ({error})"
            rule = self._rule_for_vectors(list(tensors((args, kwargs))))
            raise ValueError(self._message(name, problem, rule)) from error
        if cut is not None and name in _ALONE and isinstance(output, Tensor) and output.shape[-1:] == cut.shape[-1:]:
            setattr(output, _CUT, True)
        return output

    def _message(self, name: str, problem: str, way_out: str = "") -> str:
        return (
            f"{self._name} ({type(self._module).__name__}) is split over the tp ranks, and {name.strip('_')} "
            f"{problem}. {way_out}{'Else leave' if way_out else 'Leave'} the module whole, with a rule 'replicate' for "
            f"each of its layers ({layers_of(self._name, self._module)}) in "
            "FSDP2Config(tp_plan={'extends': 'model', ...}), or use tp=1"
        )

    def _rule_for_vectors(self, operands: list[Tensor]) -> str:
        """Propose a rule for vectors of the module that are among ``operands``, or seen in another shape there."""
        vectors = {n: p for n, p in self._module.named_parameters(recurse=False) if p.ndim == 1}
        met = [n for n, p in vectors.items() if any(x is p or x._base is p for x in operands)]
        names = ", ".join(dict.fromkeys(wildcard(f"{self._name}.{name}") for name in met))
        return f"Give what has a number for each head or feature a rule 'colwise' ({names}). " if names else ""


def _mark_output(member: nn.Module, args: tuple, output: Any) -> None:
    if isinstance(output, Tensor):
        setattr(output, _CUT, True)


def _is_across(name: str, cut: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    place, default = _ACROSS[name]
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if place < len(args) else default))
    if dims is None:
        return True
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    return any(isinstance(dim, int) and dim in (-1, cut.ndim - 1) for dim in listed)
