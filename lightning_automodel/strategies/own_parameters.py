"""Parameters of a LightningModule's own, beside models and layers: a temperature, prompts, weights of losses.

No forward pass tells when to gather them, so each rank holds them whole. Optimizers, hooks and checkpoints have
DTensors of the mesh that all parameters have; where the user's code computes, the attributes are plain tensors in the
same memory. Of ``self.temperature``, in a step of two ranks with different samples::

                             GPU 0      GPU 1
    self.parameters()        0.07       0.07       DTensor, Replicate
    self.temperature         0.07       0.07       plain, within a step
    gradient of it           2          4          until the backward pass ends
    self.temperature.grad    3          3          the DTensor's, by one all-reduce for all such parameters
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_automodel._compat.torch.modules import hooks_after_accumulation, own_parameters
from lightning_automodel._compat.torch.tensors import after_backward, is_in_backward
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.loading.broadcast import broadcast
from lightning_automodel.loading.initialize import stored_dtype
from lightning_automodel.parallel.hidden_outputs import differentiable

_OWN = "_own_parameters_that_are_whole"
_FOLLOWED = "_is_followed_by_own_parameters"
_NOTHING = object()
_OF_TENSORS: Any = Tensor  # its attributes, beneath those of a subclass
_Attributes = list[tuple[dict[str, Any], str, Any]]


@dataclass(frozen=True)
class Place:
    """Where a parameter hangs that no submodel holds."""

    owner: nn.Module
    name: str
    path: str

    @property
    def parameter(self) -> Tensor | None:
        """Return what hangs there now."""
        return own_parameters(self.owner).get(self.name)


def hold_whole(places: Sequence[Place], mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> None:
    """Put DTensors at ``places``, with the values of rank 0 on each rank of ``mesh``. Collective.

    Args:
        places: of plain parameters, or of DTensors, which stay.
        mesh: of all other parameters.
        device: on which they lie.
        dtype: of floating-point parameters (:func:`stored_dtype`).

    Raises:
        ValueError: naming a parameter without values.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for place in places:
        parameter = place.parameter
        if parameter is None or isinstance(parameter, DTensor):
            continue
        if parameter.is_meta:
            raise ValueError(
                f"{place.path} is on the meta device, and no file or initialization gives a parameter beside models "
                "its values; make it outside of torch.device('meta')"
            )
        if parameter not in made:
            made[parameter] = _replicated(parameter, mesh, device, dtype)
        own_parameters(place.owner)[place.name] = made[parameter]


def _replicated(parameter: Tensor, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    values = parameter.detach().to(device, stored_dtype(parameter, dtype)).contiguous()
    broadcast(values, mesh)
    stored = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    new = nn.Parameter(stored, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    for hook in hooks_after_accumulation(parameter):  # type: ignore[arg-type]
        new.register_post_accumulate_grad_hook(hook)
    return new


class _Plain(nn.Parameter):
    """The memory of a DTensor as a plain tensor: gradient, data and flag are the DTensor's, to read and to write."""

    stored: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    @property
    def own_gradient(self) -> Tensor | None:
        """Return what the running backward pass has given on this rank."""
        return _OF_TENSORS.grad.__get__(self)

    def forget(self) -> None:
        """Drop it."""
        _OF_TENSORS.grad.__set__(self, None)

    def _laid(self, value: Tensor) -> Tensor:
        return DTensor.from_local(value, self.stored.device_mesh, self.stored.placements, run_check=False)

    @property
    def grad(self) -> Tensor | None:
        if is_in_backward():
            return self.own_gradient
        return None if self.stored.grad is None else local_tensor(self.stored.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.stored.grad = None if value is None else self._laid(value)

    @property
    def data(self) -> Tensor:
        return _OF_TENSORS.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _OF_TENSORS.data.__set__(self, value)
        self.stored.data = self._laid(_OF_TENSORS.data.__get__(self))

    @property
    def requires_grad(self) -> bool:
        flag = _OF_TENSORS.requires_grad.__get__(self)
        return flag if self.stored is None else self.stored.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.stored.requires_grad_(requires_grad)
        return self.follow(requires_grad)

    def follow(self, requires_grad: bool) -> Self:
        """Let autograd compute gradients, or not; what the DTensor says of itself stays."""
        super().requires_grad_(requires_grad)
        return self


class OwnParameters:
    """Lets code of the user's compute with parameters that each rank holds whole, and averages their gradients.

    Args:
        module: with them.
    """

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._places: list[Place] = []
        self._plain: dict[Tensor, _Plain] = {}
        self._is_known = self._is_waiting = False
        self._entered: list[_Attributes] = []

    @classmethod
    def of(cls, module: "pl.LightningModule", places: Sequence[Place]) -> "OwnParameters":
        """Return those of ``module`` at ``places``; one object for all trainers, as are the hooks on their owners."""
        found = vars(module).setdefault(_OWN, cls(module))
        known = {place.owner for place in found._places}
        for owner in {place.owner: None for place in places if place.owner not in known}:
            owner.register_forward_pre_hook(found._enter, prepend=True)  # they are called outside of steps, too
            owner.register_forward_hook(found._leave, always_call=True)
        found._places = list(places)
        return found

    @contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """Let attributes be plain tensors within this context."""
        before = self._put()
        try:
            yield
        finally:
            self._take(before)

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Surround a backward pass that all ranks run, behind which gradients are those of all samples. Collective."""
        self._begin_anew()
        self._is_known = True
        try:
            with self.in_place():
                yield
        finally:
            self._is_known = self._is_waiting = False
        self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the averages of what the last backward pass gave to the gradients of the DTensors. Collective."""
        trained = {stored: plain for stored, plain in self._plain.items() if stored.requires_grad}
        for stored, average in zip(trained, _averages(list(trained.values())), strict=True):
            if average is not None:
                gradient = DTensor.from_local(average, stored.device_mesh, stored.placements, run_check=False)  # type: ignore[attr-defined]
                stored.grad = gradient if stored.grad is None else stored.grad.add_(gradient)
                for hook in hooks_after_accumulation(stored):  # type: ignore[arg-type]
                    hook(stored)
        for plain in self._plain.values():
            plain.forget()

    def follow_passes(self, models: Iterable[nn.Module]) -> None:
        """Take part in each backward pass through ``models``, which all ranks run: also on those that read no parameter
        of the module's own in it.
        """
        for model in models:
            if _FOLLOWED not in vars(model):
                vars(model)[_FOLLOWED] = True
                model.register_forward_pre_hook(self._begin_anew, prepend=True)
                model.register_forward_hook(self._follow)

    def _follow(self, model: nn.Module, args: tuple, output: Any) -> None:
        if not is_in_backward() and (begins := differentiable(output)):
            register_multi_grad_hook(begins, self._note, mode="any")

    def _begin_anew(self, *unused: Any) -> None:
        """Drop what a backward pass has left that an exception has ended."""
        if not is_in_backward():
            self._is_known = self._is_waiting = False
            for plain in self._plain.values():
                plain.forget()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._entered.append(self._put())

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._entered:  # nothing, if a hook before raised
            self._take(self._entered.pop())

    def _put(self) -> _Attributes:
        """Put plain tensors where attributes are looked up first, but for what stands in the place of a parameter
        (``torch.func.functional_call``).

        Returns:
            what was there.
        """
        before: _Attributes = []
        for place in self._places:
            attributes, stored = vars(place.owner), place.parameter
            before.append((attributes, place.name, attributes.get(place.name, _NOTHING)))
            if isinstance(stored, DTensor):
                attributes[place.name] = self._plain_of(stored)
            else:
                attributes.pop(place.name, None)
        return before

    def _take(self, before: _Attributes) -> None:
        for attributes, name, value in before:
            attributes.pop(name, None)
            if value is not _NOTHING:
                attributes[name] = value

    def _plain_of(self, stored: Tensor) -> _Plain:
        local = local_tensor(stored)
        plain = self._plain.get(stored)
        if plain is None or plain.data_ptr() != local.data_ptr() or plain.device != local.device:
            plain = self._plain[stored] = _Plain(local.detach(), requires_grad=False)
            if plain.is_floating_point() or plain.is_complex():
                plain.follow(True).register_post_accumulate_grad_hook(self._note)
            plain.stored = stored
        if plain.is_floating_point() or plain.is_complex():
            plain.follow(stored.requires_grad or self._may_be_chosen)
        return plain

    @property
    def _may_be_chosen(self) -> bool:
        """Tell whether a step may choose behind its beginning what trains (``toggle_optimizer``)."""
        return not self._module.automatic_optimization

    def _note(self, _: Tensor) -> None:
        if not (self._is_known or self._is_waiting):  # loss.backward(), of which no strategy hears
            self._is_waiting = True
            after_backward(lambda: after_backward(self._end))  # behind FSDP2's own, on all ranks

    def _end(self) -> None:
        self._is_waiting = False
        self.reduce()


def _averages(parameters: Sequence[_Plain]) -> list[Tensor | None]:
    """Average the gradients of ``parameters`` over all ranks, in float32 at least; ``None`` where no rank has one."""
    if not parameters:
        return []
    given = [parameter.own_gradient for parameter in parameters]
    if dist.get_world_size() == 1:
        return given
    has = [gradient is not None for gradient in given]
    gradients = [_wide(torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, given, strict=True)]
    marks = [torch.full((1,), float(there), device=parameters[0].device) for there in has]
    _average_each([*gradients, *marks])
    is_there = [mine or bool(mark) for mine, mark in zip(has, marks, strict=True)]
    return [g.to(p.dtype) if there else None for p, g, there in zip(parameters, gradients, is_there, strict=True)]


def _wide(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _average_each(tensors: Iterable[Tensor]) -> None:
    """Average ``tensors`` in place, those of one dtype together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        by_dtype.setdefault(flat.dtype, []).append(flat)
    for parts in by_dtype.values():
        together = torch.cat(parts).div_(dist.get_world_size())
        dist.all_reduce(together)
        for part, average in zip(parts, together.split([part.numel() for part in parts]), strict=True):
            part.copy_(average)
