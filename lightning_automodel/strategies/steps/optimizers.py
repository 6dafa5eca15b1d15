"""Refuses optimizers whose update would be another one on shards than on whole tensors.

Most update each element of a tensor from that element alone, so that a shard is updated as it is within the whole. That
is measured, on one process and for any class: the optimizer takes steps with a matrix, and with two parts of it. So is
whether it reads the loss that a closure returns.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from itertools import count
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel._compat.torch.optimization import no_step_hooks
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.uneven_shards import PARTITION
from lightning_automodel.gradients import to_local_if_dtensor

RIGHT_ON_SHARDS = ("Muon", "StableAdamW")
"""They work on whole matrices, and DTensor's operators compute the same from shards: compared with one process."""

_ANY_RATE = 1e-3
_SHAPE, _SPLITS = (64, 128), ((0, 31), (1, 63))  # quantized states have blocks of 256 elements, from 4096 on


def check_optimizers(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Check that each optimizer updates the sharded parameters of ``module`` as it would update whole ones.

    Raises:
        ValueError: naming the optimizer, the parameter, and what to use instead; or a layer with sparse gradients.
    """
    _refuse_sparse_gradients(module)
    _refuse_norms_of_rows(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        sharded = next((p for p in held if _is_sharded(p)), None)
        if sharded is None:
            continue
        name = type(optimizer).__name__
        is_right = name in RIGHT_ON_SHARDS and not hasattr(sharded, PARTITION)
        found = True if is_right else updates_each_element_alone(optimizer)
        if found is None:
            warn_once(f"{name}: could not be tried on a matrix and on its parts; compare with a run on one process")
        elif not found:
            raise ValueError(
                f"{name}: its update of an element depends on other elements of the same tensor, and "
                f"{names.get(sharded, 'a parameter')} is sharded, so it would be another update than on one process; "
                "use DDPStrategy, where every process holds whole tensors, or an optimizer that updates each element "
                "alone, such as torch.optim.AdamW (docs/optimizers.md)"
            )


def _refuse_sparse_gradients(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"{name} ({type(layer).__name__}) has sparse=True, and its sparse gradients can be neither reduced "
                "over ranks nor clipped; use sparse=False, and in the place of torch.optim.SparseAdam an optimizer "
                "such as torch.optim.AdamW (docs/optimizers.md)"
            )


def _refuse_norms_of_rows(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        is_embedding = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad
        if is_embedding and layer.max_norm is not None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{name} ({type(layer).__name__}) has max_norm={layer.max_norm}: its forward pass writes shorter rows "
                "into the weight for the tokens that it sees, so each rank would have other rows, and shards none of "
                "them; use max_norm=None, and shorten what the layer returns, where it is needed "
                "(torch.renorm(x, 2, -1, max_norm) of [tokens, features])"
            )


def updates_each_element_alone(optimizer: Optimizer) -> bool | None:
    """Try copies of ``optimizer``, with the options of each of its groups, on a matrix and on its two halves.

    Of one that wraps another, the other is tried.

    Returns:
        ``None`` if it cannot be tried like that.
    """
    wrapped = _wrapped(optimizer)
    found = [updates_each_element_alone(inner) for inner in wrapped]
    found += [None] if wrapped else [_updates_alone(optimizer, options) for options in _kinds_of_groups(optimizer)]
    return False if False in found else None if None in found else True


def _updates_alone(optimizer: Optimizer, options: dict[str, Any]) -> bool | None:
    for update in (_updated, partial(_updated, with_losses=True)):  # Lightning gives every step a closure
        try:
            return _is_the_same_in_parts(partial(update, optimizer, options))
        except Exception:  # whatever a class of a user's own needs that this matrix lacks
            continue
    return None


def _is_the_same_in_parts(update: Callable[[Tensor, list[Tensor]], Tensor]) -> bool | None:
    start, *gradients = _matrices()
    whole = update(start, gradients)
    parts = []
    for dim, at in _SPLITS:
        cut = [tensor.tensor_split([at], dim) for tensor in (start, *gradients)]
        parts.append(torch.cat([update(value, steps) for value, *steps in zip(*cut, strict=True)], dim))
    scale = (whole - start).norm()
    return all(bool((part - whole).norm() <= 1e-4 * scale) for part in parts) if scale else None


def reads_loss(optimizer: Optimizer) -> bool:
    """Tell whether steps of ``optimizer`` follow the loss that a closure returns; also if it cannot be tried."""
    if _wrapped(optimizer):
        return True
    start, *gradients = _matrices()
    loss = torch.zeros(()).as_subclass(_NotedLoss)
    try:
        for options in _kinds_of_groups(optimizer):
            _updated(optimizer, options, start, gradients, lambda: loss)
    except Exception:
        return True
    return loss.is_read


class _NotedLoss(Tensor):
    """Notes that something is computed from it."""

    is_read = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, cls):
                value.is_read = True
        return super().__torch_function__(function, types, args, kwargs or {})


def _wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Find the optimizers whose steps are a part of those of ``optimizer``: a copy would step with them."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def _matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(_SHAPE, generator=generator) for _ in range(4)]


@contextmanager
def explaining_step(optimizer: Optimizer) -> Generator[None, None, None]:
    """Explain, within this context, an operation of ``optimizer`` that DTensor does not know, or that mixes tensors.

    Raises:
        ValueError: naming the optimizer, and what to use instead.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if not _is_of_optimizer(error, optimizer):
            raise
        name = type(optimizer).__name__
        if _MIXED in str(error):
            raise ValueError(
                f"{name} computes with plain tensors of its own beside sharded parameters, which holds for whole ones "
                "only; use DDPStrategy, where every process holds whole tensors, or another optimizer, such as "
                "torch.optim.AdamW (docs/optimizers.md)"
            ) from error
        raise ValueError(
            f"{name} uses an operation that DTensor cannot carry out on sharded parameters "
            f"({error}); leave out foreach=True or fused=True, or use another optimizer, such as torch.optim.AdamW "
            "(docs/optimizers.md)"
        ) from error


_MIXED = "got mixed torch.Tensor and DTensor"
_WITHIN_STEP = ("closure", "training_step", "on_before_optimizer_step", "configure_gradient_clipping")
"""what Lightning calls within a step, and is not the optimizer's"""


def _is_of_optimizer(error: BaseException, optimizer: Optimizer) -> bool:
    if not any(words in str(error) for words in ("sharding strategy", "placement", _MIXED)):
        return False
    kinds = [kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer]
    files = {sys.modules[kind.__module__].__file__ for kind in kinds}
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    is_of_step = all(code.co_name not in _WITHIN_STEP for code in frames)
    return is_of_step and any(code.co_filename in files for code in frames)


def _updated(
    optimizer: Optimizer,
    options: dict[str, Any],
    value: Tensor,
    gradients: Iterable[Tensor],
    closure: Callable[[], Tensor] | None = None,
    with_losses: bool = False,
) -> Tensor:
    """Return ``value`` after a step with each of ``gradients``.

    Without a ``closure``, optimizers that want one get losses that fall, so that a search along a line moves; all do
    ``with_losses``.
    """
    parameter = nn.Parameter(value.clone(memory_format=torch.contiguous_format))
    trial, own = copy.copy(optimizer), optimizer.param_groups[0]["params"]
    trial.__dict__ = {
        **{name: [parameter] if kept is own else kept for name, kept in vars(optimizer).items()},
        "state": _initial_state(optimizer, parameter),
        "param_groups": [{**copy.deepcopy(options), "params": [parameter]}],
        **no_step_hooks(),
    }
    wants = with_losses or signature(type(trial).step).parameters["closure"].default is Parameter.empty
    if closure is None and wants:
        losses = count(1e6, -1e3)
        closure = lambda: torch.tensor(next(losses))  # noqa: E731
    closures: list[Any] = [] if closure is None else [closure]
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        for gradient in gradients:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            type(trial).step(trial, *closures)
    return parameter.detach()


def _initial_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[Any, Any]:
    """Return what an optimizer that makes its states at once would hold for ``parameter``."""
    state: dict[Any, Any] = defaultdict(dict)
    for own, values in optimizer.state.items():
        if isinstance(own, Tensor):
            state[parameter] = {
                key: torch.full_like(parameter, float(_any_element(value)))
                if isinstance(value, Tensor) and value.shape == own.shape
                else copy.deepcopy(value)
                for key, value in values.items()
            }
            break
    return state


def _any_element(tensor: Tensor) -> Tensor:
    local = to_local_if_dtensor(tensor)
    return local.flatten()[0].detach() if local.numel() else torch.zeros(())


def _kinds_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Collect the options of groups that differ in more than numbers; no rate is 0, with which schedules begin."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if not options.get("lr", True):
            options["lr"] = options.get("initial_lr") or _ANY_RATE
        kind = {key: bool(value) if isinstance(value, float) else value for key, value in options.items()}
        kinds.setdefault(repr({**kind, "lr": None, "initial_lr": None, "name": None}), options)
    return list(kinds.values())


def _is_sharded(parameter: Tensor) -> bool:
    if hasattr(parameter, PARTITION):
        return True
    if not isinstance(parameter, DTensor):
        return False
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return any(size > 1 and not placement.is_replicate() for size, placement in sizes)
