"""Lets code of a user's compute with parameters that each rank holds whole: which attributes it sees, and when."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, register_multi_grad_hook
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.lightning.modules import optimizers_of
from lightning_automodel._compat.torch.modules import hooks_after_accumulation
from lightning_automodel._compat.torch.tensors import after_backward, is_in_backward, version_of
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.parallel.hidden_outputs import differentiable
from lightning_automodel.strategies.own_parameters.averages import averages
from lightning_automodel.strategies.own_parameters.places import Place
from lightning_automodel.strategies.own_parameters.plain import Plain

_OWN = "_own_parameters_that_are_whole"
_SEEN = "_own_parameters_that_its_forward_sees"
_FOLLOWING = "_own_parameters_that_follow_its_passes"
_NOTHING = object()
_Attributes = list[tuple[dict[str, Any], str, Any]]


class OwnParameters:
    """Lets code of the user's compute with parameters that each rank holds whole, and averages their gradients.

    Args:
        module: with them.
    """

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._places: list[Place] = []
        self._plain: dict[Tensor, Plain] = {}
        self._is_known = self._is_waiting = False
        self._entered: list[_Attributes] = []

    @classmethod
    def of(cls, module: "pl.LightningModule", places: Sequence[Place]) -> "OwnParameters":
        """Return those of ``module`` at ``places``; one object for all trainers, as are the hooks on their owners."""
        found = vars(module).setdefault(_OWN, cls(module))
        for owner in {place.owner: None for place in places}:
            if _SEEN not in vars(owner):
                owner.register_forward_pre_hook(_enter, prepend=True)  # they are called outside of steps, too
                owner.register_forward_hook(_leave, always_call=True)
            vars(owner)[_SEEN] = found  # it may have been another module's before
        found._places = list(places)
        found._plain.clear()  # of parameters that may be gone since the last run
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
        self.begin_anew()
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
        for stored, average in zip(trained, averages(list(trained.values())), strict=True):
            if average is not None:
                gradient = DTensor.from_local(average, stored.device_mesh, stored.placements, run_check=False)  # type: ignore[attr-defined]
                stored.grad = gradient if stored.grad is None else stored.grad.add_(gradient)
                for hook in hooks_after_accumulation(stored):  # type: ignore[arg-type]
                    hook(stored)
        for plain in self._plain.values():
            plain.forget()

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Surround a step of an optimizer, and let autograd see what it has changed: a graph from before it holds the
        values of then.
        """
        yield
        for stored, plain in self._plain.items():
            if plain.version != (now := version_of(stored)):
                plain.version = now
                increment_version(plain)

    def follow_passes(self, models: Iterable[nn.Module]) -> None:
        """Take part in each backward pass through ``models``, which all ranks run: also on those that read no parameter
        of the module's own in it.
        """
        for model in models:
            if _FOLLOWING not in vars(model):
                model.register_forward_pre_hook(_begin_anew, prepend=True)
                model.register_forward_hook(_follow)
            vars(model)[_FOLLOWING] = self  # and nobody else: it may have been another module's before

    @staticmethod
    def leave_alone(models: Iterable[nn.Module]) -> None:
        """Let no parameters follow passes through ``models``, whose module has none of its own."""
        for model in models:
            if _FOLLOWING in vars(model):
                vars(model)[_FOLLOWING] = None

    def follow(self, output: Any) -> None:
        """Take part in the backward pass through ``output`` of a model."""
        if not is_in_backward() and (begins := differentiable(output)):
            register_multi_grad_hook(begins, self._note, mode="any")

    def begin_anew(self) -> None:
        """Drop what a backward pass has left that an exception has ended."""
        if not is_in_backward():
            self._is_known = self._is_waiting = False
            for plain in self._plain.values():
                plain.forget()

    def enter(self) -> None:
        """Put plain tensors in place, until :meth:`leave`."""
        self._entered.append(self._put())

    def leave(self) -> None:
        """Take them back; nothing, if a hook before has raised."""
        if self._entered:
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
            if stored is None:  # gone since, and perhaps a number has its name now
                continue
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

    def _plain_of(self, stored: Tensor) -> Plain:
        local = local_tensor(stored)
        plain = self._plain.get(stored)
        if plain is None or plain.data_ptr() != local.data_ptr() or plain.device != local.device:
            plain = self._plain[stored] = Plain(local.detach(), requires_grad=False)
            if plain.is_floating_point() or plain.is_complex():
                plain.follow(True).register_post_accumulate_grad_hook(self._note)
            plain.stored, plain.version = stored, version_of(stored)
        if plain.is_floating_point() or plain.is_complex():
            plain.follow(stored.requires_grad or self._may_be_chosen(stored))
        return plain

    def _may_be_chosen(self, stored: Tensor) -> bool:
        """Tell whether a step may choose behind its beginning that ``stored`` trains (``toggle_optimizer``)."""
        groups = (group for optimizer in optimizers_of(self._module) for group in optimizer.param_groups)
        return any(parameter is stored for group in groups for parameter in group["params"])

    def _note(self, _: Tensor) -> None:
        if not (self._is_known or self._is_waiting):  # loss.backward(), of which no strategy hears
            self._is_waiting = True
            after_backward(lambda: after_backward(self._end))  # behind FSDP2's own, on all ranks

    def _end(self) -> None:
        self._is_waiting = False
        self.reduce()


def _enter(owner: nn.Module, args: tuple) -> None:
    vars(owner)[_SEEN].enter()


def _leave(owner: nn.Module, args: tuple, output: Any) -> None:
    vars(owner)[_SEEN].leave()


def _begin_anew(model: nn.Module, args: tuple) -> None:
    if (own := vars(model)[_FOLLOWING]) is not None:
        own.begin_anew()


def _follow(model: nn.Module, args: tuple, output: Any) -> None:
    if (own := vars(model)[_FOLLOWING]) is not None:
        own.follow(output)
