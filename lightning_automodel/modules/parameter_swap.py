"""Swaps the parameters of a module for other tensors while it runs, also where it is recomputed.

::

    pre-hook   p._parameters["weight"] = compute(weight)      a slice, a narrow copy
               the module's own forward sees compute(weight); names and stored parameters stay
    hook       p._parameters["weight"] = weight               also if the forward pass raised
               weight has what was written into compute(weight), or that is refused

The tables of parameters are looked up once, not in every pass: this runs in every block.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.modules import own_buffers, own_parameters
from lightning_automodel.modules.forward import Context, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import find_adapted_parameters
from lightning_automodel.modules.writes import State, Writes

Compute = Callable[[Any], Tensor]
"""A stored parameter to the tensor that the forward pass sees, with autograd."""

_WRITE = "Change the parameter itself (parameter.data = value, or in place, within torch.no_grad())"
_EXCHANGED = "_is_in_the_place_of_a_parameter"
_Table = dict[str, Any]
_Swapped = list[tuple[_Table, str, Tensor, State]]


class ParameterSwap:
    """Exchange parameters of one module, and of modules inside of it, during its forward pass.

    A parameter that hangs in several places is computed once. A copy of the module copies this object along, so each
    copy exchanges its own parameters.

    Args:
        stored: the class of the tensors that are exchanged; what is of another class was exchanged by an outer call.
        refuses_others: or by the user, which is an error then.
    """

    def __init__(self, stored: type[Tensor] = nn.Parameter, refuses_others: bool = False) -> None:
        self._stored, self._refuses_others = stored, refuses_others
        self._entries: list[tuple[_Table, str, Compute]] = []
        self._owners: set[nn.Module] = set()
        self._adapted: list[tuple[_Table, str]] = []  # put into themselves by what adapts them, in every pass
        self._running: list[_Swapped] = []
        self._writes = Writes()

    def add(self, owner: nn.Module, name: str, compute: Compute) -> None:
        """Exchange the parameter ``name`` of ``owner`` for what ``compute`` gives for it."""
        self._entries.append((own_parameters(owner), name, compute))
        self._owners.add(owner)

    def install(self, module: nn.Module, behind_others: bool = False) -> None:
        """Exchange in every forward pass of ``module``, and in every recomputation of it.

        Args:
            module: which it surrounds.
            behind_others: what is computed depends on hooks that are there. Else they see it: a user's may compute a
                weight from parameters.
        """
        module.register_forward_pre_hook(self._enter, prepend=not behind_others)
        module.register_forward_hook(self._leave, always_call=True)
        keep_for_recomputation(module, self._again)
        for wrapper, layer, name in find_adapted_parameters(module):
            if layer in self._owners:
                self._adapted.append((own_parameters(layer), name))
                put_back = partial(_put_back, own_parameters(layer), own_buffers(layer), name)
                wrapper.register_forward_hook(put_back, always_call=True)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._running.append(self._swap_in(module))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._running:  # nothing, if a hook before raised
            swapped = self._running.pop()
            lost = None if output is None else next(self._lost_writes(swapped), None)
            _swap_out(swapped)
            if lost is not None:
                raise ValueError(_message(module, *lost))

    def _again(self, module: nn.Module) -> Context:
        return self._swapped

    @contextmanager
    def _swapped(self) -> Generator[None, None, None]:
        swapped = self._swap_in()
        try:
            yield
        finally:
            _swap_out(swapped)

    def _swap_in(self, module: nn.Module | None = None) -> _Swapped:
        computed: dict[Tensor, Tensor] = {}
        swapped: _Swapped = []
        for table, name, compute in self._entries:
            parameter = table[name]
            if not isinstance(parameter, self._stored):
                if module is not None and self._refuses_others and not stands_for_parameter(parameter):
                    _swap_out(swapped)
                    raise ValueError(describe_replaced(module, table, name))
                continue
            if parameter not in computed:
                computed[parameter] = compute(parameter)
                setattr(computed[parameter], _EXCHANGED, True)
            table[name] = computed[parameter]
            swapped.append((table, name, parameter, self._writes.before((id(table), name), computed[parameter])))
        return swapped

    def _lost_writes(self, swapped: _Swapped) -> Iterator[tuple[_Table, str]]:
        """Yield what was written in a forward pass and is not stored as one process would store it."""
        for table, name, parameter, before in swapped:
            if _is_sharded_again(table[name]):
                continue
            written = self._writes.changed((id(table), name), table[name], before)
            if not written or _is_stored_whole(parameter, table[name]):
                continue
            if not any(table is other and name == adapted for other, adapted in self._adapted):
                yield table, name


def _swap_out(swapped: _Swapped) -> None:
    for table, name, parameter, _ in swapped:
        if not _is_sharded_again(table[name]):
            table[name] = parameter


def _is_sharded_again(seen: Tensor) -> bool:
    """Tell whether FSDP2 has put the shards in place since, and freed what was whole: the model was left within a part
    of it that is called by itself, and nothing has to be kept for a backward pass.
    """
    return isinstance(seen, DTensor)


def _is_stored_whole(parameter: Tensor, seen: Tensor) -> bool:
    """Tell whether the tensor that modules see is all of the stored one, in the same memory."""
    stored = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return seen.shape == parameter.shape and seen.data_ptr() == stored.data_ptr()


def stands_for_parameter(tensor: Tensor | None) -> bool:
    """Tell whether ``tensor`` was put in the place of a parameter by a swap, or nothing is there (``bias = None``)."""
    return tensor is None or hasattr(tensor, _EXCHANGED)


def describe_replaced(model: nn.Module, table: _Table, name: str, way_out: str = _WRITE) -> str:
    """Return what is wrong with a tensor that stands in the place of a sharded parameter, and the way out."""
    path = _path(model, table, name)
    return (
        f"{class_names(model)[0]} is called with another tensor in the place of its parameter {path}"
        " (torch.func.functional_call, or an assignment): the parameter is sharded, and the forward pass gathers or "
        f"cuts what is stored, so the tensor would be left out, or used whole where a rank computes a part. {way_out}, "
        "or use DDPStrategy, which takes any tensor"
    )


def _path(model: nn.Module, table: _Table, name: str) -> str:
    owner = next((path for path, part in model.named_modules() if own_parameters(part) is table), "")
    return f"{owner}.{name}".removeprefix(".")


def _message(module: nn.Module, table: _Table, name: str) -> str:
    return (
        f"the forward pass of {class_names(module)[0]} writes into its parameter {_path(module, table, name)}, in the "
        "place of which it sees another tensor (a slice of tensor parallelism, a copy in a narrower dtype): the "
        "parameter, which the optimizer and checkpoints have, would keep what was there before, or get what a slice "
        "alone gives. Compute another tensor there (normalize(weight), weight.clamp(...)) and leave the parameter as "
        "it is; or change it between two steps, in on_train_batch_start"
    )


def _put_back(parameters: _Table, buffers: _Table, name: str, *_: Any) -> None:
    """Put a swapped parameter back where it was: a wrapper that adapts it leaves what is no parameter as a buffer."""
    if name in buffers:
        parameters[name] = buffers.pop(name)
