"""Brings weights to where they belong: each rank reads or draws them, and keeps its own part.

``from_pretrained`` under :func:`sharded_loading`::

    transformers builds on meta -> our parallelize -> transformers reads, for each DTensor, the rank's slices
                                                   -> what the files lack is drawn whole, equal on all ranks, and sliced
"""

from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel._compat import empty_loading_info, patched_pretrained_loading, reports_on_rank_zero
from lightning_automodel._compat.dtensor import dtensor_like
from lightning_automodel.blocks import is_kept_in_float32
from lightning_automodel.logs import warn_once
from lightning_automodel.offloading import home_of, move
from lightning_automodel.reserving import copy_among_replicas, reserve, share
from lightning_automodel.shards import copy_from_whole

Parallelize = Callable[[PreTrainedModel], Any]


@contextmanager
def sharded_loading(
    parallelize: Parallelize,
    device: torch.device,
    replicas: ProcessGroup | None = None,
    is_restored: Callable[[PreTrainedModel], bool] | None = None,
) -> Generator[None, None, None]:
    """Within this context ``from_pretrained`` calls ``parallelize`` between building on meta and reading weights.

    Args:
        parallelize: makes the model parallel in place, ties included.
        device: where each rank's parameters and the buffers go; shards that wait on the host do not.
        replicas: ranks that hold the same (shards, or the whole model); the first reads and sends it to the others.
        is_restored: whether a checkpoint will overwrite all weights of a model, which are then not read.
    """

    def load(
        original: Callable, model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *args: Any
    ) -> Any:
        ties = tie_groups(_tie(model))
        parallelize(model)
        home = home_of(model, device)
        model.__dict__["_ties_of_lightning_automodel"] = ties
        if is_restored is not None and is_restored(model):
            reserve(model, home)
            return empty_loading_info(), None

        def read() -> Any:
            _warn_of_pickles(files)
            return original(model, state_dict, files, replace(load_config, device_map={"": home}), *args)

        return read() if replicas is None else _read_on_first(model, read, home, replicas)

    def initialize(original: Callable, model: PreTrainedModel, *args: Any) -> None:
        initialize_missing(model, lambda: original(model, *args), home_of(model, device))

    def finalize(original: Callable, model: PreTrainedModel, load_config: Any, info: Any, *args: Any) -> Any:
        loaded = set(model.state_dict()) - info.missing_and_mismatched()
        with reports_on_rank_zero():
            result = original(model, replace(load_config, device_map={"": home_of(model, device)}), info, *args)
        if replicas is not None:
            copy_among_replicas(model, sorted(loaded), replicas)
        move(model, device)
        _check_ties(model, model.__dict__.pop("_ties_of_lightning_automodel", []))
        return result

    with patched_pretrained_loading(load=load, initialize=initialize, finalize=finalize):
        yield


def _read_on_first(model: PreTrainedModel, read: Callable, device: torch.device, replicas: ProcessGroup) -> Any:
    result, error = None, None
    if replicas.rank() == 0:
        try:
            result = read()
        except Exception as caught:
            error = caught
    result, failure = share((result, error and repr(error)), replicas)
    if failure is not None:
        raise error or RuntimeError(f"the process that reads the weights for this one failed: {failure}")
    if replicas.rank() != 0:
        reserve(model, device, missing=result[0].missing_and_mismatched())
    return result


def _warn_of_pickles(files: list[str] | None) -> None:
    if files and not files[0].endswith(".safetensors"):
        warn_once(
            f"{files[0]} is a pickled file, which every rank opens as a whole (memory-mapped where the file allows); "
            "write it once more with save_pretrained, as safetensors, and each rank reads its slices only"
        )


def initialize_missing(
    model: nn.Module, initialize: Callable[[], None], home: torch.device, buffers: Iterable[Tensor] = ()
) -> None:
    """Runs ``initialize`` with every DTensor parameter that has no value yet as a whole tensor, then slices it.

    Whole, because initialization depends on shapes and random numbers must be those of one device. Rank 0's count.
    What ``initialize`` leaves of them and of ``buffers`` gets the values that the constructor of the model gives. The
    slices lie on ``home``.

    Raises:
        ValueError: naming the parameters, if the constructor leaves them, too.
    """
    whole: dict[nn.Parameter, nn.Parameter] = {}
    owners: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and not getattr(parameter, "_is_hf_initialized", False):
                if parameter not in whole:
                    whole[parameter] = _unset(parameter)
                owners.append((module, name, parameter))
    for module, name, parameter in owners:
        module._parameters[name] = whole[parameter]
    initialize()
    set_what_is_left(model, {*whole.values(), *buffers})
    sliced = {parameter: _slice_like(value, parameter, home) for parameter, value in whole.items()}
    for module, name, parameter in owners:
        module._parameters[name] = sliced[parameter]


def _unset(like: DTensor) -> nn.Parameter:
    value = torch.empty(like.shape, dtype=like.dtype, device=_real_device(like))
    return nn.Parameter(not_a_number(value), requires_grad=like.requires_grad)


def not_a_number(value: Tensor) -> Tensor:
    """Shows what initialization leaves."""
    return value.fill_(torch.nan) if value.is_floating_point() else value


def set_what_is_left(model: nn.Module, unset: Set[Tensor]) -> None:
    """Some models set values in their constructor only (apertus, its activation's), which a build on meta loses."""
    named = [*model.named_parameters(), *model.named_buffers()]
    left = {name: tensor for name, tensor in named if tensor in unset and tensor.isnan().any()}
    if not left:
        return
    if isinstance(model, PreTrainedModel):
        again = _construct_again(model)
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


def _construct_again(model: PreTrainedModel) -> nn.Module:
    """A second model, whole on the CPU. Memory that its constructor leaves unwritten is not a number there."""
    built: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on by default
    try:
        with torch.random.fork_rng(), torch.device("cpu"):
            return built(model.config)
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


def broadcast_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives real parameters and buffers the values that rank 0 has, one tensor at a time.

    Weights drawn at random differ between ranks unless everybody seeded alike; a slice of each would be a model that
    nobody drew.
    """
    if dist.get_world_size() == 1:
        return
    for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            broadcast(tensor.data, mesh)


def broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrites ``tensor`` with rank 0's, through the device that the mesh communicates on."""
    if dist.get_world_size() == 1 or tensor.numel() == 0:
        return
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    staged = tensor.to(device).contiguous()
    dist.broadcast(staged, src=0)
    tensor.copy_(staged)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters to ``dtype`` in place, except those that the model wants in float32.

    Buffers keep their dtype: rotary frequencies in bfloat16 are 1.8 rad off at position 4096.
    """
    lenient = (getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else ()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            keep = is_kept_in_float32(model, name) or any(pattern in name for pattern in lenient)
            wanted = torch.float32 if keep and dtype.itemsize < 4 else dtype
            if parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)


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
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = unset = torch.empty_like(buffer, device=device)
                buffers.append(not_a_number(unset))
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                if parameter not in made:
                    empty = not_a_number(torch.empty_like(parameter, device=device))
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
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


# ---- ties ------------------------------------------------------------------------------------------------------------


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: PreTrainedModel) -> PreTrainedModel:
    """transformers ties after loading; sharding must know before."""
    model.tie_weights(recompute_mapping=False)
    return model


def _check_ties(model: PreTrainedModel, groups: list[list[str]]) -> None:
    for names in groups:
        if len({id(model.get_parameter(name)) for name in names}) > 1:
            raise ValueError(
                f"{' and '.join(names)} of {type(model).__name__} are tied by its config, but the checkpoint holds "
                "different values for them; pass a config with tie_word_embeddings=False"
            )


def _real_device(parameter: DTensor) -> torch.device:
    local = parameter.to_local()
    return torch.device(parameter.device_mesh.device_type) if local.is_meta else local.device
