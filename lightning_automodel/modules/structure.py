"""Finds the structure of a model: its repeated blocks and the modules above them, without a list of classes."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel._compat.transformers.models import kept_in_all_models, kept_in_float16_models
from lightning_automodel.modules.chosen import is_chosen_from
from lightning_automodel.modules.wrappers import unwrapped

_LISTS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
LARGE = 2**25
"""Elements from which on a matrix outside of blocks is worth a gather of its own: 64 MiB in bfloat16."""
KEY_VALUE_PROJECTIONS = ("k_proj", "v_proj")


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the outermost repeated blocks by their qualified names, in the order of registration.

    In transformers a block is a ``GradientCheckpointingLayer`` (280 of 284 language models). A module without any, of
    one's own or of another library, has for blocks the members of its module lists and dicts that repeat a class, and
    the members of what is never called itself among these (a list for each stage of a vision model). Layers whose
    ``forward`` their owner calls by that name are none: nothing can be done around them.
    """
    blocks = dict(_outermost(model, lambda module, _: isinstance(module, GradientCheckpointingLayer)))
    blocks = blocks or dict(_outermost(model, _is_repeated))
    return {name: block for name, block in blocks.items() if not _calls_forward(_owner(model, name))}


def find_independent_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the blocks that FSDP2 can gather each on its own; the others belong to the unit of the whole model.

    Left out are blocks

    * that share parameters with other modules (zamba's repeated attention): one unit would gather what others use;
    * that a batch may skip (mllama's cross attention, without images; heads and experts that code of a user's chooses
      from a list): ranks would gather different blocks;
    * that run outside of their forward pass (reformer's reversible ones), where nothing gathers for them.
    """
    blocks = find_blocks(model)
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(outermost(list(blocks), name) or "")
    sharing = {name for names in owners.values() if len(names) > 1 for name in names}
    skippable = find_towers(model) and {name for name, block in blocks.items() if _only_attends_to_images(block)}
    lists = {name.rpartition(".")[0] for name, b in blocks.items() if not isinstance(b, GradientCheckpointingLayer)}
    chosen = {name for name in lists if _is_chosen(model, name)}
    return {
        name: block
        for name, block in blocks.items()
        if name not in sharing and name not in skippable and not runs_outside_of_forward(block)
        if name.rpartition(".")[0] not in chosen
    }


def runs_outside_of_forward(block: nn.Module) -> bool:
    """Tell whether a block is reversible (Reformer): its model computes it again in a backward pass of its own."""
    return hasattr(block, "backward_pass")


def _is_chosen(model: nn.Module, list_name: str) -> bool:
    holder, _, name = list_name.rpartition(".")
    return is_chosen_from(model.get_submodule(holder), name)


def find_input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """Finds what turns tokens into vectors; ``None`` for models that do not say (of formulas in images, for
    example).
    """
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def find_names_of_ends(model: nn.Module) -> tuple[str | None, str | None]:
    """Find the names of what turns tokens into vectors and of what makes the logits; ``None`` where there is none."""
    if not isinstance(model, PreTrainedModel):
        return None, None
    names = {id(module): name for name, module in model.named_modules()}
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    heads = (head for module in models if (head := module.get_output_embeddings()) is not None)
    return names.get(id(find_input_embedding(model))), names.get(id(next(heads, None)))


def find_large_ends(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Finds the embedding and the head of a language model with a large vocabulary, each by its name; or nothing.

    Only where they are two matrices: then no other module reads their weights.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(model, PreTrainedModel) or not isinstance(head, nn.Linear):
        return {}, {}
    readers = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    names = {id(module): name for name, module in model.named_modules()}
    found: list[dict[str, nn.Module]] = [
        {names[id(end)]: end}
        for end in (find_input_embedding(model), head)
        if isinstance(end, nn.Embedding | nn.Linear)
        and id(end) in names
        and end.weight.numel() >= LARGE
        and readers[id(end.weight)] == 1
    ]
    return (found[0], found[1]) if len(found) == 2 else ({}, {})


def _only_attends_to_images(block: nn.Module) -> bool:
    children = {name for name, _ in block.named_children()}
    return "cross_attn" in children and "self_attn" not in children


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that runs the block ``name``: what holds it, lists apart."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return _owner(model, name.rpartition(".")[0]) if "." in name and isinstance(owner, _LISTS) else owner


def _calls_forward(owner: nn.Module) -> bool:
    """Tell whether the code of ``owner`` calls ``forward`` of a child, past its hooks."""
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    return code is not None and "forward" in code.co_names and "super" not in code.co_names


def _is_repeated(module: nn.Module, parent: nn.Module | None) -> bool:
    is_called = type(module).forward is not nn.Module.forward
    return is_called and isinstance(parent, _LISTS) and _repeats(parent)


def _repeats(members: nn.Module) -> bool:
    """Tells whether these are layers, and not the different steps of one."""
    kinds = [type(member) for member in members.children() if next(member.parameters(), None) is not None]
    return len(kinds) == 1 or len(set(kinds)) < len(kinds)


def find_towers(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the encoders of a composite model (vision, audio) by their names.

    They are models inside of the model with a config of their own that is not the language model's.
    """
    shared = {id(getattr(model, "config", None)), id(text_config(model))}

    def accept(module: nn.Module, _: nn.Module | None) -> bool:
        return isinstance(module, PreTrainedModel) and id(module.config) not in shared

    return dict(_outermost(model, accept))


def reads_more_than_text(model: nn.Module) -> bool:
    """Tells whether the config of ``model`` holds that of a language model, with or without towers beside it."""
    return getattr(model, "config", None) is not text_config(model)


def tower_modalities(tower: nn.Module) -> set[str]:
    """Reads from its class what a tower reads: "vision", "audio" or both."""
    read = getattr(tower, "input_modalities", ())
    read = {read} if isinstance(read, str) else set(read)
    main = getattr(tower, "main_input_name", "")
    vision = bool(read & {"image", "video"}) or main.startswith("pixel")
    audio = "audio" in read or main in ("input_features", "input_values")
    return {name for name, found in (("vision", vision), ("audio", audio)) if found}


def last_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> set[str]:
    """Finds the blocks that end a module list: what runs last in the forward pass and first in the backward."""
    by_list: dict[str, str] = {}
    for name in blocks:
        by_list[name.rpartition(".")[0]] = name
    return set(by_list.values())


def outermost(names: list[str], name: str) -> str | None:
    """Finds the one of ``names`` (module prefixes, none inside another) that contains ``name``, if any."""
    parts = name.split(".")
    known = set(names)
    return next((p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in known), None)


def names_around(names: Iterable[str]) -> set[str]:
    """Names all modules around these modules or parameters, but the model."""
    return {name[:i] for name in names for i, character in enumerate(name) if character == "."}


def class_names(model: nn.Module) -> list[str]:
    """Lists the names of the model's class and of its bases, most special first, as their sources have them."""
    return [name_in_source(kind) for kind in type(model).__mro__]


def name_in_source(kind: type) -> str:
    """Return the name of a class; of one that FSDP2 made (``FSDPName``), that of the class of which it did."""
    return class_in_source(kind).__name__


def class_in_source(kind: type) -> type:
    """Return a class; for one that FSDP2 made (``FSDPName``), the class of which it did."""
    return kind.__bases__[-1] if FSDPModule in kind.__bases__ else kind


def text_config(model: nn.Module) -> Any:
    """Finds the config of the language model inside ``model`` (heads, widths); ``None`` for a module without a
    config.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # it has several: one that reads text, and one of what it writes (MusicGen)
        return config.get_text_config(decoder=True)


def nearest_config(model: nn.Module, name: str) -> Any:
    """Return the config of the nearest model of transformers around the module ``name``, if there is one."""
    names = name.split(".")
    around = (model.get_submodule(".".join(names[:i])) for i in reversed(range(len(names))))
    return next((module.config for module in around if isinstance(module, PreTrainedModel)), None)


def keep_no_cache(config: Any) -> None:
    """Let a model of ``config`` keep no keys and values for tokens to come: a training step has none."""
    config.use_cache = config.get_text_config(decoder=True).use_cache = False


def configs_of_layers(config: Any) -> list[Any]:
    """List the configs of the layers, or ``config`` alone where its fields hold for all of them.

    Of a heterogeneous one transformers refuses to read what differs between layers.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def config_of(layer: nn.Module, config: Any) -> Any:
    """Return what holds for ``layer``: ``config``, or where layers have their own, the one of its ``layer_idx``."""
    configs, index = configs_of_layers(config), getattr(layer, "layer_idx", None)
    if len(configs) == 1:
        return configs[0]
    return configs[index] if isinstance(index, int) and index < len(configs) else None


def kv_heads(attention: nn.Module) -> int | None:
    """Counts the key/value heads of an attention module, from its own sizes (they may differ per layer)."""
    return heads_in(attention, KEY_VALUE_PROJECTIONS[0])


def heads_in(attention: nn.Module, projection: str) -> int | None:
    """Counts the heads that a projection of an attention module gives; ``None`` if the size of one is not known."""
    layer, head_dim = unwrapped(getattr(attention, projection, None)), getattr(attention, "head_dim", None)
    if not isinstance(layer, nn.Linear) or not isinstance(head_dim, int):
        return None
    return layer.weight.shape[0] // head_dim


def is_kept_in_float32(model: nn.Module, name: str, dtype: torch.dtype | None = None) -> bool:
    """Tells whether ``model`` wants the parameter or buffer ``name`` stored and used in float32, where the rest is in
    ``dtype``; ``None``: whatever the precision of the rest.

    diffusers says so in an attribute that for transformers concerns float16 only; there, both exist.
    """
    lenient = kept_in_float16_models(model) if dtype == torch.float16 else ()
    return any(pattern in name for pattern in (*kept_in_all_models(model), *lenient))


def computes_in_float32(model: nn.Module, name: str) -> bool:
    """Tells whether the parameter ``name`` is kept in float32 by ``model``, or by what it computes with: a batch norm
    has running statistics, buffers that keep their dtype, and torch wants its weights in the same one.
    """
    owner = reduce(getattr, name.split(".")[:-1], model)  # get_submodule is not there in TorchScript
    statistics = getattr(owner, "running_mean", None)
    is_beside = isinstance(statistics, Tensor) and statistics.dtype == torch.float32
    return is_beside or is_kept_in_float32(model, name)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Tells whether floating-point numbers of ``other`` are not rounded in ``dtype``: float16 has digits that bfloat16
    has not, which has larger numbers.
    """
    mine, theirs = torch.finfo(dtype), torch.finfo(other)
    return mine.eps <= theirs.eps and mine.max >= theirs.max


def _outermost(
    model: nn.Module,
    accept: Callable[[nn.Module, nn.Module | None], bool],
    prefix: str = "",
    parent: nn.Module | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, torch.jit.ScriptModule):  # it has neither tables to read nor a forward pass to change
        return
    if prefix and accept(model, parent) and next(model.parameters(), None) is not None:
        yield prefix, model
        return
    children = model.named_children()
    if (adapted := own_children(model).get("base_layer")) is not None:
        children = iter([("base_layer", adapted)])  # beside it are factors, which their wrapper may read without a call
    for name, child in children:
        yield from _outermost(child, accept, f"{prefix}.{name}" if prefix else name, model)
