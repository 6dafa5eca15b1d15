"""Router logits and attention maps that transformers records inside of split layers: whole values on every rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel._compat.transformers.models import recorded_outputs, recordings_of_call
from lightning_automodel.distributed.collectives import gather, scale_gradient
from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.forward import SharedByCopies, arguments_of, named_arguments
from lightning_automodel.modules.structure import (
    class_names,
    configs_of_layers,
    names_around,
    nearest_config,
    outermost,
)
from lightning_automodel.parallel.tensor.beside import same_container
from lightning_automodel.parallel.tensor.numbers_of_heads import around_parts
from lightning_automodel.parallel.tensor.origins import comes_of, let_pass
from lightning_automodel.parallel.tensor.trial_weights import is_whole_now
from lightning_automodel.plans import Layout

ROUTER_LOGITS, ATTENTIONS = "router_logits", "attentions"
_ASKED = "output_attentions"
_HEADS_IN_CONFIGS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def install_recorded_shares(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Makes of what is recorded inside of split layers what one process records, on every rank.

    * Router logits are whole, and go to an auxiliary loss that is whole on every rank, while gradients inside a
      boundary are summed over tp: the recorded value passes on ``1 / tp`` of its gradient.
    * Attention maps [batch, heads / tp, seq, seq] are gathered where a call asks for them, and where a model collects
      them itself, of what its layers return (GPT-J).

    What the layer itself computes with stays as it is: one hook before transformers' and one after it.
    """
    found = list(recorded_outputs(model, ROUTER_LOGITS))
    if found:
        log(f"{class_names(model)[0]}: transformers records router_logits of {len(found)} modules")
    for name, module, _, index in found:
        if outermost(layout.boundaries, name) is not None:
            undo = _Undo(group.size(), _message_of_mixed(name, module))
            _Recorded(index, lambda x: scale_gradient(x, 1 / group.size()), undo).install(module)
    for module, key, index in _split_attentions(model, layout):
        _Recorded(index, _joining_if_recorded(key, group)).install(module)
    for module, heads in _returning_attentions(model, layout):
        module.register_forward_hook(_Returned(heads, group).gather, with_kwargs=True)


def _joining_if_recorded(key: str, group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Make a function, which copies of a module share, unlike objects: they would copy the group."""
    return lambda x: _all_heads(x, group) if key in recordings_of_call() else x


def _all_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Join maps [..., heads / tp, queries, keys] of the ranks."""
    return gather(let_pass(x), x.ndim - 3, x.shape[-3] * group.size(), group)


def _split_attentions(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, str, int]]:
    """Find the modules with a rank's heads among those whose attention maps are recorded."""
    split = around_parts(layout)
    for name, module, key, index in list(recorded_outputs(model, ATTENTIONS)):
        if name in split:
            yield module, key, index


def _returning_attentions(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, set[int]]]:
    """Find the modules with a rank's heads that an argument asks for attention maps, and how many heads these may have.

    These are boundaries, at whose end values are what one process has, and outside of them the innermost ones.
    """
    split = around_parts(layout)
    asked = {name for name, module in model.named_modules() if name in split and _ASKED in arguments_of(module)}
    recorded = {name for name, *_ in recorded_outputs(model, ATTENTIONS)}
    innermost = asked - recorded - names_around([*asked, *recorded])
    for name in sorted({outermost(layout.boundaries, name) or name for name in innermost} & asked):
        configs = configs_of_layers(nearest_config(model, name))
        numbers = [getattr(config, key, 0) for config in configs for key in _HEADS_IN_CONFIGS]
        stages = [number if isinstance(number, list | tuple) else [number] for number in numbers]
        yield model.get_submodule(name), {number for stage in stages for number in stage}


class _Returned(SharedByCopies):
    """Makes attention maps that a split module returns beside its features whole.

    Args:
        heads: of all ranks, as many as encoders or decoders may have.
        group: over tp.
    """

    def __init__(self, heads: set[int], group: ProcessGroup) -> None:
        self.heads, self.group = heads, group

    def gather(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Join the heads of the ranks: a forward hook."""
        asked = named_arguments(module, args, kwargs).get(_ASKED)
        if not asked or is_whole_now() or not isinstance(output, tuple | list):
            return output
        return same_container(output, (output[0], *map(self._whole, output[1:])))

    def _whole(self, x: Any) -> Any:
        is_map = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 3
        return _all_heads(x, self.group) if is_map and x.shape[-3] * self.group.size() in self.heads else x


class _Recorded:
    """The hooks before and after transformers' one, which records the output ``index`` of a module.

    ::

        output --[change]--> another one --[hooks of users, transformers records it]--[restore]--> output

    Args:
        index: of the output, where there are several.
        function: makes what is to be recorded.
        undo: for outputs that hooks of users have made of the other one.
    """

    def __init__(
        self, index: int, function: Callable[[Tensor], Tensor], undo: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        self.index, self.function, self.undo = index, function, undo
        self.own: Tensor | None = None
        """between the two hooks: what the layer computes with"""
        self.recorded: Tensor | None = None

    def install(self, module: nn.Module) -> None:
        """Run these hooks in every forward pass of ``module``."""
        module.register_forward_hook(self.change, prepend=True)
        module.register_forward_hook(self.restore)

    def change(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put in place what is to be recorded."""
        value = output[self.index] if isinstance(output, tuple | list) else output
        if value is None:  # attention maps that its implementation does not have
            return output
        self.own, self.recorded = value, self.function(value)
        return self._put(output, self.recorded)

    def restore(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Put back what was recorded and nothing else: in between, hooks of a boundary have reduced other outputs, and
        those of a user may have put others in their places.
        """
        own, recorded, self.own, self.recorded = self.own, self.recorded, None, None
        if own is None or recorded is None:
            return output
        if not isinstance(output, tuple | list):
            return self._restored(output, own, recorded)
        return same_container(output, (self._restored(x, own, recorded) for x in output))

    def _restored(self, x: Any, own: Tensor, recorded: Tensor) -> Any:
        if x is recorded:
            return own
        return self.undo(x, recorded) if self.undo is not None and isinstance(x, Tensor) else x

    def _put(self, output: Any, value: Tensor) -> Any:
        if not isinstance(output, tuple | list):
            return value
        place = self.index % len(output)
        return same_container(output, (value if i == place else x for i, x in enumerate(output)))


@dataclass(frozen=True)
class _Undo:
    """Gives outputs that hooks have made of recorded logits the gradient of what a layer computes with.

    Args:
        tp: number of ranks.
        why: a hook may not make an output of them and of other values.
    """

    tp: int
    why: str

    def __call__(self, x: Tensor, recorded: Tensor) -> Tensor:
        comes, is_mixed = comes_of(x, recorded)
        if comes and is_mixed:
            raise ValueError(self.why)
        return scale_gradient(x, self.tp) if comes else x


def _message_of_mixed(name: str, module: nn.Module) -> str:
    return (
        f"a forward hook of yours makes an output of {name} ({type(module).__name__}) of its router logits and of "
        "other values, and under tp a loss of these logits has another gradient than what the layer computes with "
        "them. Register the hook when the model is parallel, in on_fit_start: it then sees what the layer computes with"
    )
