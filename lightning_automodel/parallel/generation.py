"""Keeps ranks that share shards together while each of them generates as long as its own samples take.

Every forward pass gathers parameters, so a rank whose samples have all ended goes on with fillers: passes of one token
that leave no trace. Before each pass the ranks vote whether any of them has one left; what ``generate`` computes on a
rank is that of one process. Two data ranks, of which the first has ended behind two tokens::

              pass 1    pass 2    pass 3    pass 4
    GPU 0     a a a     a1        ~         ~         ~: a filler      a1: its samples end, and it votes "none"
    GPU 1     b b b     b1        b2        b3        behind it all vote "none"
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationMixin

from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.guards.hooks_of_users import without_hooks_of_users

_ROOT = "_model_that_generates_in_step"
_ENCODED = ("encoder_outputs", "attention_mask")
_generating: list[nn.Module] = []


def generate_in_step(model: nn.Module, data: DeviceMesh) -> None:
    """Make ``generate`` of ``model``, and of models inside, go on until all ranks that share its shards have ended.

    Args:
        model: of any library; what is no model of transformers that generates stays as it is.
        data: over the last axis of which parameters are sharded.
    """
    if data.size(data.ndim - 1) == 1:
        return
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            vars(module)[_ROOT] = model  # no child, and a deep copy of the model has its own
            vars(module)["generate"] = MethodType(_in_step(type(module).generate, data), module)


def _in_step(generate: Callable[..., Any], data: DeviceMesh) -> Callable[..., Any]:
    """Wrap ``generate`` of a class; copies of a model share what comes of it."""

    @wraps(generate)
    def generate_together(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(module is self for module in _generating):
            return generate(self, *args, **kwargs)
        _refuse_two_models(self)
        kwargs["synced_gpus"] = False  # transformers' own way, whose inputs do not fit behind the end of a rank
        rounds = _Rounds(data)
        with _voting(self, rounds):
            output = generate(self, *args, **kwargs)
        rounds.fill(self)
        return output

    return generate_together


class _Rounds:
    """One ``generate`` on all ranks: a round is a forward pass on each of them.

    Args:
        data: over the last axis of which parameters are sharded.
    """

    def __init__(self, data: DeviceMesh) -> None:
        self._data = data
        self._last: dict[str, Any] = {}

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a round with a pass of this rank, which needs no votes of others: a host waits for no accelerator."""
        self._last = {name: kwargs[name] for name in (*_ENCODED, "decoder_input_ids") if name in kwargs}
        self._vote(active=True)

    def fill(self, module: nn.Module) -> None:
        """Go through rounds of other ranks until there are none."""
        if not self._vote(active=False).item():
            return
        with torch.no_grad(), _evaluating(module), without_hooks_of_users(module.modules()):
            inputs = self._least_inputs(module)
            module(**inputs)
            while self._vote(active=False).item():
                module(**inputs)

    def _vote(self, active: bool) -> torch.Tensor:
        votes = torch.full((), int(active), device=self._data.device_type)  # not a copy from the host, which would wait
        dist.all_reduce(votes, group=self._data.get_group(self._data.ndim - 1))
        return votes

    def _least_inputs(self, module: Any) -> dict[str, Any]:
        """Make those of one token: a decoder's alone, or behind what the encoder has said of this rank's samples."""
        if not module.config.is_encoder_decoder:
            return {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=module.device)}
        ids = self._last["decoder_input_ids"][..., -1:]
        return {**{name: self._last.get(name) for name in _ENCODED}, "decoder_input_ids": torch.zeros_like(ids)}


def _refuse_two_models(module: nn.Module) -> None:
    if _generating and vars(_generating[-1])[_ROOT] is not vars(module)[_ROOT]:
        one, other = class_names(_generating[-1])[0], class_names(module)[0]
        raise ValueError(
            f"{other} generates within generate of {one}, and both are sharded over data ranks: how often it is called "
            "differs between them. Generate with one model at a time, or keep the other whole on each rank (outside of "
            "the LightningModule)"
        )


@contextmanager
def _voting(module: nn.Module, rounds: _Rounds) -> Generator[None, None, None]:
    handle = module.register_forward_pre_hook(rounds.begin, prepend=True, with_kwargs=True)  # before those that gather
    _generating.append(module)
    try:
        yield
    finally:
        _generating.remove(module)
        handle.remove()


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None, None, None]:
    """Keep ``module`` in evaluation mode within this context: it draws nothing then, and counts nothing."""
    with ExitStack() as stack:
        for part in module.modules():
            if part.training:
                stack.callback(setattr, part, "training", True)
                part.training = False
        yield
