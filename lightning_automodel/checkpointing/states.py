"""Collects and restores the states of a model and its optimizers, by the names of parameters, in any layout."""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel._compat.torch.modules import load_hooks_of_users
from lightning_automodel.checkpointing.files.dcp import StoredTensor, fetch
from lightning_automodel.checkpointing.targets import allocate, targets_of, targets_of_none, with_their_dtypes
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import as_stored, like_parameter, map_tensors, stored_state

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
State = dict[str, Any]


def clean_name(name: str) -> str:
    """Removes from a name what ``torch.compile`` and torch's activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# ---- collecting ------------------------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> State:
    """Collect parameters and persistent buffers by name, without copies but for those that a ``state_dict`` of the
    user's makes; names of one parameter share one tensor.
    """
    detached: dict[int, Tensor] = {}
    state: State = {}
    shown = model.state_dict(keep_vars=True)
    for name, own in _own_state(model, shown).items():
        value = shown[name]
        if isinstance(value, Tensor):
            value = detached.setdefault(id(value), like_parameter(own, value))
        state[clean_name(name)] = value
    return state


def named_state(model: nn.Module) -> State:
    """Yields parameters and persistent buffers by the names that they have in a checkpoint."""
    own = _own_state(model, model.state_dict(keep_vars=True))
    return {clean_name(name): value for name, value in own.items()}


def _own_state(model: nn.Module, shown: State) -> State:
    """Put what ``model`` computes with in the place of copies of it, which a ``state_dict`` of the user's or a hook may
    show (in another dtype, on another device): what is read into a copy is lost.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    mine = {id(value) for value in own.values()}
    return {name: value if id(value) in mine else own.get(name, value) for name, value in shown.items()}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Returns ``optimizer.state_dict()`` with names in place of the numbers of parameters, so that it outlives a change
    of their order, of their groups and of the layout. Entries that a class or a hook adds to it stay.

    Raises:
        ValueError: if the optimizer updates a tensor that is not a parameter of ``model``.
    """
    names = _names_in_order(model, optimizer)
    state = stored_state(optimizer)
    if not state:
        return {}
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    values = {_name(optimizer, key, names): _storable(value) for key, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def _name(optimizer: Optimizer, key: Any, names: list[str]) -> str:
    """Name a state: of a parameter, or what an optimizer keeps for all of them (``optimizer.state["k"]``)."""
    if not isinstance(key, int | str):
        kind = type(optimizer).__name__
        raise ValueError(f"{kind} keeps a state under {key!r}, which has no name in a checkpoint; use a string")
    return names[key] if isinstance(key, int) else key


def _storable(value: Any) -> Any:
    """Gather what is in lists and the like (LBFGS has some), which ranks do not write in parts."""
    if isinstance(value, Mapping):
        return {key: _storable(item) for key, item in value.items()}
    return value if isinstance(value, Tensor) else gather_state(value)


def gather_state(state: Any) -> Any:
    """Gathers a nest of containers: whole tensors on the CPU of rank 0, and no tensors elsewhere.
    Collective. Tensors are gathered one by one, so that no other rank holds more than its part.
    """
    gathered: dict[int, Tensor | None] = {}

    def gather(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in gathered:
            gathered[id(tensor)] = gather_on_rank_zero(tensor)
        return gathered[id(tensor)]

    return map_tensors(state, gather)


# ---- restoring -------------------------------------------------------------------------------------------------------


def restore_model(
    model: nn.Module, source: Mapping[str, Any], strict: bool = True, left_out: Set[str] = frozenset()
) -> None:
    """Overwrites the model's parameters and buffers with ``source``; each rank reads its part. Collective.

    Args:
        model: in its final layout.
        source: whole tensors, or tensors stored in a checkpoint folder, by name. Of tied parameters one name suffices.
        strict: refuse a parameter that is missing and a name that does not exist.
        left_out: names that may be missing all the same.

    Raises:
        ValueError: naming what is missing, unknown, or of another shape.
    """
    source = {clean_name(name): value for name, value in source.items()}
    shown, torchs = model.state_dict(keep_vars=True), nn.Module.state_dict(model, keep_vars=True)
    targets = _own_state(model, {**torchs, **shown})
    _refuse_copies(model, {name: value for name, value in targets.items() if clean_name(name) in source})
    ties = _ties(targets)
    extra = targets.keys() - (torchs.keys() & shown.keys())  # of the user's state_dict, whose method may take it out
    _check_names(source, ties, strict, {clean_name(name) for name in {*left_out, *extra}})
    pairs: list[tuple[Tensor, StoredTensor | Tensor]] = []
    others = {}
    for names in ties:
        values = {name: source[clean_name(name)] for name in names if clean_name(name) in source}
        if not values:
            continue
        _check_tie(values)
        found = next(iter(values.values()))
        if isinstance(targets[names[0]], DTensor):
            target = as_stored(targets[names[0]])
            pairs.append((target, _of_shape(target, found, names[0])))
        else:
            others[names[0]] = found.load() if isinstance(found, StoredTensor) else found
    if pairs:
        _warn_of_load_hooks(model)
    fetch(pairs)
    if others:
        nn.Module.load_state_dict(model, others, strict=False)  # a method of the model's own has seen all of ``source``


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> None:
    """Gives ``optimizer`` the state ``saved``; each rank reads its part. Collective.

    Args:
        model: holds the optimizer's parameters, in its final layout.
        optimizer: built for ``model``; it need not have made a step.
        saved: from :func:`optimizer_state`, or the ``state_dict()`` of an optimizer with the same parameters in the
            same order on any number of devices. Tensors may be stored in a checkpoint folder.
        weights: that were saved with it, by name. Where a parameter has the dtype that it had, its states keep theirs.

    Raises:
        ValueError: if the numbers of parameters differ, or a state does not fit its parameter, or is of another class.
    """
    if not (saved or optimizer.state_dict()):  # where Lightning put no optimizer
        return
    names = _names_in_order(model, optimizer)
    _check_class(optimizer, saved["param_groups"])
    saved = _by_name(saved, names, [len(group["params"]) for group in optimizer.param_groups])
    _warn_of_others(optimizer, names, [name for group in saved["param_groups"] for name in group["params"]])
    pairs: list[tuple[Tensor, StoredTensor | Tensor]] = []
    state: dict[Any, Any] = targets_of_none(saved, pairs)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if name in saved["state"]:
            state[i] = targets_of(parameter, saved["state"][name], pairs)
    own = allocate(torch.empty(0), {k: v for k, v in saved.items() if k not in ("state", "param_groups")}, pairs)
    fetch(pairs)
    groups = _groups_for(optimizer, saved["param_groups"], iter(names))
    optimizer.load_state_dict({**own, "state": state, "param_groups": groups})
    dtypes = {clean_name(name): getattr(value, "dtype", None) for name, value in (weights or {}).items()}
    for i, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if i in state and parameter in optimizer.state and dtypes.get(name) == parameter.dtype:
            with_their_dtypes(optimizer.state[parameter], state[i], parameter.dtype)


def _refuse_copies(model: nn.Module, targets: State) -> None:
    held = {id(value) for value in (*model.parameters(), *model.buffers())}
    copies = [name for name, value in targets.items() if isinstance(value, DTensor) and id(value) not in held]
    if copies:
        raise ValueError(
            f"state_dict of {type(model).__name__} shows {copies[0]}, a copy of a parameter under another name, and "
            "what is loaded into a copy is lost; keep the names of parameters in state_dict and its hooks, and rename "
            "in on_save_checkpoint and on_load_checkpoint"
        )


def _ties(targets: Mapping[str, Any]) -> list[list[str]]:
    """Groups names that stand for one tensor."""
    groups: dict[Any, list[str]] = {}
    for name, value in targets.items():
        groups.setdefault(id(value) if isinstance(value, Tensor) else name, []).append(name)
    return list(groups.values())


def _warn_of_load_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for hook in load_hooks_of_users(module):
            warn_once(
                f"{name or type(model).__name__} has a hook before load_state_dict ({hook}), which is not called for "
                "sharded parameters: each rank reads its part of them. Change what is loaded in on_load_checkpoint"
            )


def _check_tie(values: Mapping[str, StoredTensor | Tensor]) -> None:
    """Check that all names of one parameter hold the same value, which is read only where it is stored twice."""
    (first, one), *others = values.items()
    for name, other in others:
        if are_equal(one, other):
            continue
        raise ValueError(
            f"{first} and {name} are one parameter of the model (tied), and the checkpoint holds different values of "
            "them; untie the model (tie_word_embeddings=False in its config), or delete one of the two from "
            "checkpoint['state_dict'] in on_load_checkpoint"
        )


def are_equal(one: StoredTensor | Tensor, other: StoredTensor | Tensor) -> bool:
    """Tell whether two tensors, of which any may lie in a checkpoint, hold the same values; reads them if need be."""
    if one is other:
        return True
    if one.shape != other.shape:
        return False
    whole = [value.load() if isinstance(value, StoredTensor) else value for value in (one, other)]
    return torch.equal(*(value.full_tensor() if isinstance(value, DTensor) else value for value in whole))


def _check_names(source: State, ties: list[list[str]], strict: bool, left_out: Set[str]) -> None:
    known = [[clean_name(name) for name in names] for names in ties]
    missing = [names[0] for names in known if not any(name in source or name in left_out for name in names)]
    unknown = sorted(source.keys() - {name for names in known for name in names})
    if strict and (missing or unknown):
        raise ValueError(
            f"the checkpoint does not fit the model: {_shorten('missing', missing)}; {_shorten('unknown', unknown)}. "
            "Set strict_loading=False on the LightningModule to load what fits"
        )


def _shorten(what: str, names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{what}: {', '.join(names[:count]) or 'none'}{more}"


def _of_shape(target: Tensor, value: Any, name: str) -> Any:
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(
            f"{name} has the shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the model; "
            "the checkpoint is of another model"
        )
    return value


def _names_in_order(model: nn.Module, optimizer: Optimizer) -> list[str]:
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in names for p in parameters):
        raise ValueError(
            f"{type(optimizer).__name__} updates a tensor that is not a parameter of {type(model).__name__}, so its "
            "state has no name in a checkpoint; build the optimizer in configure_optimizers from self.parameters()"
        )
    return [names[id(p)] for p in parameters]


def _check_class(optimizer: Optimizer, saved: list[State]) -> None:
    """Check that the options of the saved groups can be those of ``optimizer``. Other versions of a class have more or
    fewer, other classes both.
    """
    options = set(saved[0]) if saved else set(optimizer.defaults)
    missing = sorted(set(optimizer.defaults) - options - {"differentiable"})  # torch adds it to every copy of one
    unknown = sorted(options - set(optimizer.state_dict()["param_groups"][0]) - {"initial_lr", "param_names"})
    if missing and unknown:
        raise ValueError(
            f"the checkpoint holds the state of another optimizer than {type(optimizer).__name__}: with "
            f"{', '.join(unknown)}, and without {', '.join(missing)}. Return the optimizer of the checkpoint from "
            "configure_optimizers; or begin with a new one: trainer.validate(module, ckpt_path=...) loads the weights, "
            "and trainer.fit(module) starts from them"
        )


def _warn_of_others(optimizer: Optimizer, names: list[str], saved: list[str]) -> None:
    new = sorted(set(names) - set(saved))
    gone = sorted(set(saved) - set(names))
    if new or gone:
        warn_once(
            f"{type(optimizer).__name__} updates other parameters than that of the checkpoint: "
            f"{_shorten('without a state, and begin anew', new)}; {_shorten('not updated any more', gone)}"
        )


def _by_name(saved: Mapping[str, Any], names: list[str], sizes: list[int]) -> State:
    """Replace the numbers of parameters in an optimizer's state by their names; the numbers follow the groups."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    if not keys or isinstance(keys[0], str):
        state = {clean_name(name): value for name, value in saved["state"].items()}
        groups = [{**g, "params": [clean_name(name) for name in g["params"]]} for g in saved["param_groups"]]
        return {**saved, "state": state, "param_groups": groups}
    if len(keys) != len(names):
        raise ValueError(
            f"the optimizer in the checkpoint has {len(keys)} parameters and this one has {len(names)}; "
            "configure_optimizers must choose the same parameters in the same order"
        )
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if saved_sizes != sizes:
        raise ValueError(
            f"the optimizer in the checkpoint has groups of {saved_sizes} parameters and this one of {sizes}; a "
            "checkpoint in one file numbers them in the order of the groups, so configure_optimizers must make the "
            "same groups (a folder, of save_distributed_checkpoint=True, has their names, and any groups will do)"
        )
    name_of = dict(zip(keys, names, strict=True))
    groups = [{**g, "params": [name_of[key] for key in g["params"]]} for g in saved["param_groups"]]
    state = {name_of.get(key, key): value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def _groups_for(optimizer: Optimizer, saved: list[State], names: Any) -> list[State]:
    """Gives the optimizer's groups the hyperparameters of the saved group that holds their first parameter."""
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        own = [next(names) for _ in group["params"]]
        match = next((g for g in saved if own and own[0] in g["params"]), {})
        groups.append({**group, **match, "params": group["params"]})
    return groups
