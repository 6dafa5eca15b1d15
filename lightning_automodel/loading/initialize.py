"""Gives a sharded model the initial weights of one device: drawn whole, equal on all ranks, and sliced."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.torch.modules import is_persistent, own_buffers, own_parameters
from lightning_automodel._compat.transformers.models import is_initialized
from lightning_automodel.distributed.shards import copy_from_whole
from lightning_automodel.loading.broadcast import broadcast
from lightning_automodel.loading.host_offload import home_of
from lightning_automodel.loading.stand_in import Gathered, StandIn
from lightning_automodel.modules.structure import computes_in_float32, is_kept_in_float32


def initialize_missing(
    model: nn.Module, initialize: Callable[[], None], home: torch.device, buffers: Iterable[Tensor] = ()
) -> None:
    """Runs ``initialize`` with whole plain tensors in the place of all DTensors, then slices those that it gave values.

    Whole, because initialization depends on shapes, knows plain tensors only, and random numbers must be those of one
    device; rank 0's count. What ``initialize`` leaves of parameters without values and of ``buffers`` gets the values
    that the constructor of the model gives. The slices lie on ``home``.

    Raises:
        ValueError: naming the parameters, if the constructor leaves them, too.
    """
    whole, loaded = _plain(model)
    _put(model, {**whole, **loaded})
    initialize()
    set_what_is_left(model, {*whole.values(), *buffers})
    gathered = {shard: value for shard, stand_in in loaded.items() if (value := _gathered(stand_in)) is not None}
    sliced = {}
    for shard, value in {**whole, **gathered}.items():
        sliced[shard] = _slice_like(value, shard, home)
        value.data = value.data.new_empty(0)  # the model never lies there whole and sliced
    _put(model, {plain: sliced.get(shard, shard) for shard, plain in [*whole.items(), *loaded.items()]})


def _plain(model: nn.Module) -> tuple[dict[nn.Parameter, nn.Parameter], dict[nn.Parameter, StandIn]]:
    """Make plain tensors for the DTensors of ``model``: memory for those without values, else stand-ins."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    loaded: dict[nn.Parameter, StandIn] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        if is_initialized(parameter):
            loaded[parameter] = StandIn(Gathered(parameter, _real_device(parameter)))
            loaded[parameter].__dict__.update(parameter.__dict__, _is_param=True)
        else:
            whole[parameter] = _unset(parameter)
    return whole, loaded


def _gathered(stand_in: StandIn) -> nn.Parameter | None:
    """Return the whole tensor behind a stand-in that initialization looked at, and may have written to, if any."""
    if stand_in.gathered.tensor is None:
        return None
    value = nn.Parameter(stand_in.gathered.tensor, requires_grad=stand_in.requires_grad)
    value.__dict__.update({name: x for name, x in stand_in.__dict__.items() if name != "gathered"})
    return value


def _put(model: nn.Module, others: Mapping[Any, Any]) -> None:
    """Replace parameters of ``model``, tied ones everywhere."""
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter in others:
                own_parameters(module)[name] = others[parameter]


def _unset(like: DTensor) -> nn.Parameter:
    value = torch.empty(like.shape, dtype=like.dtype, device=_real_device(like))
    return nn.Parameter(not_a_number(value), requires_grad=like.requires_grad)


def not_a_number(value: Tensor) -> Tensor:
    """Fill memory with NaN, which shows what initialization leaves unset."""
    return value.fill_(torch.nan) if value.is_floating_point() else value


def set_what_is_left(model: nn.Module, unset: Set[Tensor]) -> None:
    """Set what models set in their constructor only (apertus' activation, tables that code of the hub computes there),
    which a build on meta loses.

    Raises:
        ValueError: naming those that the constructor leaves, too.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    left = {name: tensor for name, tensor in named if tensor in unset and _is_left(tensor)}
    if not left:
        return
    if isinstance(model, PreTrainedModel):
        again = _construct_again(model, draws=any(isinstance(tensor, nn.Parameter) for tensor in left.values()))
        constructed = {**dict(again.named_parameters()), **dict(again.named_buffers())}
        for name, tensor in left.items():
            tensor.data.copy_(constructed[name])
    names = [name for name, tensor in left.items() if tensor.isnan().any()]
    if names:
        raise ValueError(
            f"the initialization of {type(model).__name__} leaves {', '.join(names)}: one process would train on "
            "memory that nobody has written; initialize them in _init_weights (reset_parameters of a module of your "
            "own), or build the model outside of torch.device('meta')"
        )


def _is_left(tensor: Tensor) -> bool:
    """Tell whether nothing was written into memory that was made for a tensor."""
    return bool(tensor.isnan().any()) if tensor.is_floating_point() else tensor._version == 0


def unread_tables(model: PreTrainedModel) -> list[Tensor]:
    """Mark the buffers that are in no file, whose memory transformers has just made, as not a number; return them."""
    found = [
        buffer
        for module in model.modules()
        for name, buffer in own_buffers(module).items()
        if buffer is not None and not is_persistent(module, name) and not buffer.is_meta
    ]
    return [not_a_number(buffer) for buffer in found]


def _construct_again(model: PreTrainedModel, draws: bool) -> nn.Module:
    """Builds a second model, whole on the CPU.

    With ``draws`` memory that its constructor leaves unwritten is not a number there. Without, only buffers count:
    nobody writes into the memory of its weights, which so takes none.
    """
    built: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.random.fork_rng(), torch.device("cpu"), _filled_memory() if draws else no_init_weights():
        return built(model.config)


@contextmanager
def _filled_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on by default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _slice_like(value: nn.Parameter, like: nn.Parameter, home: torch.device) -> nn.Parameter:
    assert isinstance(like, DTensor)
    broadcast(value.data, like.device_mesh)
    sliced = dtensor_like(torch.empty_like(like.to_local(), device=home), like)
    copy_from_whole(sliced, value.data)
    new = nn.Parameter(sliced, requires_grad=value.requires_grad)
    new.__dict__.update(value.__dict__)
    return new


def broadcast_weights(model: nn.Module, mesh: DeviceMesh, apart_from: Set[Tensor] = frozenset()) -> None:
    """Gives real parameters and buffers the values that rank 0 has, one tensor at a time.

    Weights drawn at random differ between ranks unless everybody seeded alike; a slice of each would be a model that
    nobody drew.

    Args:
        model: whose tensors are overwritten.
        mesh: tells the device to communicate on.
        apart_from: tensors that stay as they are.
    """
    if dist.get_world_size() == 1:
        return
    for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        if not tensor.is_meta and not isinstance(tensor, DTensor) and tensor not in apart_from:
            broadcast(tensor.data, mesh)


def cast_parameters(model: nn.Module, dtype: torch.dtype, wide: Container[nn.Parameter] = ()) -> None:
    """Casts floating-point parameters to ``dtype`` in place, except those that the model wants in float32.

    Those in ``wide`` stay in float32 as well if they are, and float64 is not narrowed to float32. Buffers keep their
    dtype: rotary frequencies in bfloat16 are 1.8 rad off at position 4096.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            keep = parameter in wide and parameter.dtype == torch.float32
            keep = keep or computes_in_float32(model, name) or is_kept_in_float32(model, name, dtype)
            wanted = stored_dtype(parameter, torch.float32 if keep and dtype.itemsize < 4 else dtype)
            if parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)


def stored_dtype(parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype ``parameter`` is stored where others are in ``dtype``; float64 is for a reason."""
    if not parameter.is_floating_point() or (parameter.dtype, dtype) == (torch.float64, torch.float32):
        return parameter.dtype
    return dtype


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives a model that is still on the meta device its initial weights, as its author initializes them.

    They lie on ``device``, except for shards that wait on the host.

    Raises:
        ValueError: naming the module, if a plain ``nn.Module`` holds parameters and has no ``reset_parameters``; naming
            parameters that neither initialization nor the constructor sets.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    buffers: list[Tensor] = []
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta:
                own_buffers(module)[name] = unset = torch.empty_like(buffer, device=device)
                buffers.append(not_a_number(unset))
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                if parameter not in made:
                    empty = not_a_number(torch.empty_like(parameter, device=device))
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                own_parameters(module)[name] = made[parameter]
    with torch.no_grad():
        initialize_missing(model, lambda: _initialize(model), home_of(model, device), [*buffers, *made.values()])


def _initialize(model: nn.Module) -> None:
    if isinstance(model, PreTrainedModel):
        model.initialize_weights()
        model.tie_weights(recompute_mapping=False)
        return
    for name, module in model.named_modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"{name or type(model).__name__} ({type(module).__name__}) was built on the meta device and has no "
                "reset_parameters() to give its parameters values; add one, or build it outside of torch.device('meta')"
            )


def _real_device(parameter: DTensor) -> torch.device:
    local = parameter.to_local()
    return torch.device(parameter.device_mesh.device_type) if local.is_meta else local.device
