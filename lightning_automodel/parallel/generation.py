"""Keeps ranks that share shards together while each of them generates as long as its own samples take.

Every forward pass gathers parameters, so a rank whose samples have all ended goes on with fillers: passes of one token
that leave no trace. Before each pass the ranks vote whether any of them has one left; what ``generate`` computes on a
rank is that of one process. Two data ranks, of which the first has ended behind two tokens::

              pass 1    pass 2    pass 3    pass 4
    GPU 0     a a a     a1        ~         ~         ~: a filler      a1: its samples end, and it votes "none"
    GPU 1     b b b     b1        b2        b3        behind it all vote "none"

Encoders and towers that ``generate`` calls by themselves are rounds of their own, and a rank that has nothing to encode
waits for those that have before its first token. What an encoder wants behind tokens (the next window of a long
recording) waits until no rank is amid tokens::

              pass 1    pass 2    pass 3    pass 4
    GPU 0     image     a a a     a1        ~         image: a tower, of parameters that the root gathers
    GPU 1     ~         b b b     b1        b2        ~: gathers them, and computes nothing

A model whose ``generate`` lets models inside of it generate (BLIP-2 its language model, CSM a second decoder for each
of its own tokens) votes for the one whose token is next: fillers are of that one. What such code reads of the
parameters that its model holds itself (learned queries) is whole.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cached_property, partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationMixin

from lightning_automodel.modules.structure import class_names, find_independent_blocks, find_towers, outermost
from lightning_automodel.parallel.adapters.prompts import keeping_prompts
from lightning_automodel.parallel.guards.hooks_of_users import without_hooks_of_users
from lightning_automodel.parallel.lone_parts import gather_only, own_parameters_whole, parts_of

_ROOT = "_model_that_generates_in_step"
_ENCODED = ("encoder_outputs", "attention_mask")
_generating: list["_Rounds"] = []


class _Kind(IntEnum):
    """What a rank is about to run, or waits with: those that come first run first."""

    TOKEN = 0
    """Another token of the model: nobody has to read the votes before it."""
    TOWER = 1
    """A part of the model, of whose parameters the root gathers all."""
    ENCODER = 2
    """A part with blocks that are gathered by themselves."""
    FIRST_TOKEN = 3
    """Waits for parts on other ranks."""


def generate_in_step(model: nn.Module, data: DeviceMesh, fills_towers: bool = True) -> None:
    """Make ``generate`` of ``model``, and of models inside, go on until all ranks that share its shards have ended.

    Args:
        model: of any library; what is no model of transformers that generates stays as it is.
        data: over the last axis of which parameters are sharded.
        fills_towers: gathering the root's parameters is all that towers want of other ranks; else a tower that some
            ranks call is an error on all of them.
    """
    is_alone = data.size(data.ndim - 1) == 1
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            vars(module)[_ROOT] = model  # no child, and a deep copy of the model has its own
            own = type(module).generate
            together = _reading_whole(own) if is_alone else _in_step(own, data, fills_towers)
            vars(module)["generate"] = MethodType(together, module)


def _reading_whole(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``generate`` of a class for one data rank, where parameters may be DTensors, too."""

    @wraps(generate)
    def generate_alone(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with own_parameters_whole(self):
            return generate(self, *args, **kwargs)

    return generate_alone


def _in_step(generate: Callable[..., Any], data: DeviceMesh, fills_towers: bool) -> Callable[..., Any]:
    """Wrap ``generate`` of a class; copies of a model share what comes of it."""

    @wraps(generate)
    def generate_together(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(module is self for rounds in _generating for module in rounds.modules):
            return generate(self, *args, **kwargs)
        _refuse_two_models(self)
        kwargs["synced_gpus"] = False  # transformers' own way, whose inputs do not fit behind the end of a rank
        if _generating:
            with _generating[-1].tokens_of(self):
                return generate(self, *args, **kwargs)
        rounds = _Rounds(vars(self)[_ROOT], data, fills_towers)
        with own_parameters_whole(self), keeping_prompts(), rounds.tokens_of(self), rounds.parts():
            output = generate(self, *args, **kwargs)
        rounds.end()
        return output

    return generate_together


class _Rounds:
    """One ``generate`` on all ranks: a round is a forward pass of the model, or of a part of it, on each of them.

    Args:
        root: the model that was made parallel, which parts run in the place of.
        data: over the last axis of which parameters are sharded.
        fills_towers: as :func:`generate_in_step` has it.
    """

    def __init__(self, root: nn.Module, data: DeviceMesh, fills_towers: bool) -> None:
        self.modules: list[nn.Module] = []
        self.root, self._data, self._fills_towers = root, data, fills_towers
        self._all: list[nn.Module] = [module for module in root.modules() if isinstance(module, GenerationMixin)]
        self._next: nn.Module = self._all[0]  # whose token this round is
        self._runs: nn.Module | None = None  # what a round of this rank is within
        self._has_begun = False
        self._last: dict[nn.Module, dict[str, Any]] = {}
        self._encode: Callable[[], Any] = partial(gather_only, root)

    @cached_property
    def _blocks(self) -> set[nn.Module]:
        """The blocks that are gathered by themselves."""
        towers = list(find_towers(self.root))
        return {b for n, b in find_independent_blocks(self.root).items() if outermost(towers, n) is None}

    @contextmanager
    def tokens_of(self, module: nn.Module) -> Generator[None, None, None]:
        """Vote before passes of ``module`` within this context."""
        begin = torch.compiler.disable(self._begin_token)
        before = module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)  # before those that gather
        behind = module.register_forward_hook(self._end_pass, always_call=True)
        self.modules.append(module)
        _generating.append(self)
        try:
            yield
        finally:
            _generating.pop()
            self.modules.pop()
            before.remove()
            behind.remove()

    @contextmanager
    def parts(self) -> Generator[None, None, None]:
        """Vote before parts that are called by themselves within this context."""
        begin = torch.compiler.disable(self._begin_part)
        with ExitStack() as stack:
            for part in parts_of(self.root):
                before = part.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(part.register_forward_hook(self._end_pass, always_call=True).remove)
            yield

    def end(self) -> None:
        """Go through rounds of other ranks until there are none."""
        while (kind := self._agree(None)) is not None:
            self._fill(kind)

    def _begin_token(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._runs is not None:
            return
        if self._has_begun and len(self._all) == 1:
            self._vote(_Kind.TOKEN, module)
        else:
            self._await(_Kind.TOKEN, _Kind.TOKEN if self._has_begun else _Kind.FIRST_TOKEN, module)
        self._last[module] = {name: kwargs[name] for name in (*_ENCODED, "decoder_input_ids") if name in kwargs}
        self._runs, self._has_begun = module, True

    def _begin_part(self, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._runs is not None or part in self.modules:
            return
        is_encoder = not self._blocks.isdisjoint(part.modules())
        kind = _Kind.ENCODER if is_encoder else _Kind.TOWER
        self._await(kind, kind, self.modules[-1])
        if is_encoder:
            self._encode = partial(part, *args, **kwargs)
        self._runs = part

    def _end_pass(self, module: nn.Module, *args: Any) -> None:
        if self._runs is module:
            self._runs = None

    def _await(self, kind: _Kind, vote: _Kind, module: nn.Module) -> None:
        """Go through rounds of other ranks until there is one of ``kind``, and of ``module`` if that is a token."""
        while (other := self._agree(vote, module)) != kind or (kind is _Kind.TOKEN and self._next is not module):
            self._fill(other)

    def _agree(self, kind: _Kind | None, module: nn.Module | None = None) -> _Kind | None:
        """Vote, and read what this round is; ``None``: all ranks have ended."""
        votes = self._vote(kind, module).tolist()
        first = next((kind for kind in _Kind if votes[kind]), None)
        if first is _Kind.TOWER and not self._fills_towers:
            self._refuse_few(round(votes[first]))  # no rank runs without having read this
        if first not in (_Kind.TOKEN, _Kind.FIRST_TOKEN):
            return first
        self._next = next(m for m, asked in zip(self._all, votes[len(_Kind) :], strict=True) if asked)
        return _Kind.TOKEN

    def _refuse_few(self, encoding: int) -> None:
        ranks = self._data.size(self._data.ndim - 1)
        if encoding < ranks:
            raise ValueError(
                f"{encoding} of {ranks} data ranks encode images or sounds in generate of {class_names(self.root)[0]}: "
                "where towers are gathered layer by layer (zero_dp_strategy=3 of Megatron-FSDP, "
                "tower_policy='per_layer'), the others would wait forever. Give every data rank some, or use "
                "FSDP2TPStrategy with tower_policy='root', or zero_dp_strategy=2"
            )

    def _vote(self, kind: _Kind | None, module: nn.Module | None = None) -> torch.Tensor:
        """Count the ranks that want each kind, and behind those the ones that want a token of each module."""
        count = len(_Kind) + len(self._all)
        votes = torch.zeros(count, device=self._data.device_type)  # not a copy from the host, which would wait
        if kind is not None:
            votes[kind].fill_(1)
        if module is not None and kind in (_Kind.TOKEN, _Kind.FIRST_TOKEN):
            votes[len(_Kind) + self._all.index(module)].fill_(1)
        dist.all_reduce(votes, group=self._data.get_group(self._data.ndim - 1))
        return votes

    def _fill(self, kind: _Kind | None) -> None:
        """Run what gathers as the round of other ranks does, and leaves no trace."""
        module = self._runs = self._next
        unseen = without_hooks_of_users(self.root.modules())
        with torch.no_grad(), _evaluating(self.root), unseen:
            if kind is _Kind.TOKEN:
                _run_filler(module, self._least_inputs(module))
            elif kind is _Kind.ENCODER:
                self._encode()
            else:
                gather_only(self.root)
        self._runs = None

    def _least_inputs(self, module: Any) -> dict[str, Any]:
        """Make those of a token: a decoder's alone, or behind what the encoder has said of this rank's samples.

        A decoder within a decoder begins with a place for what the other one gives, and reads a token behind it.
        """
        if not module.config.is_encoder_decoder:
            count = 1 if module is self._all[0] else 2
            return {"input_ids": torch.zeros(1, count, dtype=torch.long, device=module.device)}
        last = self._last[module]
        ids = torch.zeros_like(last["decoder_input_ids"][..., -1:])
        return {**{name: last.get(name) for name in _ENCODED}, "decoder_input_ids": ids}


def _run_filler(module: nn.Module, inputs: dict[str, Any]) -> None:
    try:
        module(**inputs)
    except (AttributeError, TypeError, ValueError) as error:  # it checks, or reads, what it was not given
        raise ValueError(
            f"{class_names(module)[0]} has ended on this data rank, others go on generating, and the passes of one "
            f"token that keep them together want more of it than a token: {error}. Let generate take as many passes on "
            "all data ranks (min_new_tokens=n, max_new_tokens=n in each call), or use DDPStrategy"
        ) from error


def _refuse_two_models(module: nn.Module) -> None:
    if _generating and _generating[-1].root is not vars(module)[_ROOT]:
        one, other = class_names(_generating[-1].modules[-1])[0], class_names(module)[0]
        raise ValueError(
            f"{other} generates within generate of {one}, and both are sharded over data ranks: how often it is called "
            "differs between them. Generate with one model at a time, or keep the other whole on each rank (outside of "
            "the LightningModule)"
        )


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None, None, None]:
    """Keep ``module`` in evaluation mode within this context: it draws nothing then, and counts nothing."""
    with ExitStack() as stack:
        for part in module.modules():
            if part.training:
                stack.callback(setattr, part, "training", True)
                part.training = False
        yield
