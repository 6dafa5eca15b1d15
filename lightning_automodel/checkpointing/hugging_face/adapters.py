"""Writes what adapters of peft have learned: as peft's own directory, or merged into the layers that they adapt.

Both ask for whole tensors by the names of the adapted model, a layer at a time, so that no process holds more.
"""

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel._compat.torch.modules import own_buffers, own_children, own_parameters
from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel._compat.torch.tensors import TorchDispatchMode
from lightning_automodel._compat.transformers.models import source_of
from lightning_automodel.checkpointing.hugging_face.description import Description
from lightning_automodel.checkpointing.hugging_face.limits_of_peft import check_merges, without_weights
from lightning_automodel.checkpointing.hugging_face.models import Fetch
from lightning_automodel.checkpointing.hugging_face.own_code import Classes
from lightning_automodel.modules.ties import say_untied
from lightning_automodel.modules.wrappers import adapters_of, is_wrapper, name_without_wrappers, unwrapped

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Before the names in peft's files, which are those of its own wrapper around the model."""
_BESIDE = "base_model."
"""Before the names there of what the wrapper holds beside the model."""


def with_adapters(description: Description, classes: Classes | None = None) -> PreTrainedModel:
    """Build a model with its adapters, without weights; what adapters hold beside parameters is as peft draws it.
    Arguments and errors are those of its ``build``.
    """
    from accelerate import init_empty_weights
    from peft import get_peft_model

    check_exportable(description)
    model = description.build(classes)
    wrapped: Any = None
    for name in description.adapters:
        config = config_of(description, name)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others begin from weights
        with init_empty_weights(include_buffers=False), without_weights(config):
            if wrapped is None:
                wrapped = get_peft_model(model, config, name)
            else:
                wrapped.add_adapter(name, config)
    layers: list[Any] = [module for module in model.modules() if is_wrapper(module)]
    for layer in layers:
        layer.set_adapter(list(description.active))
    return model


def config_of(description: Description, name: str) -> Any:
    """Read the config of one adapter."""
    from peft import PeftConfig

    config: Any = PeftConfig.from_peft_type(**json.loads(description.adapters[name]))
    if config.peft_type == "ADALORA":
        config.rank_pattern = None  # factors have all ranks here: those that went without are zero
    return config


def check_exportable(description: Description) -> None:
    """Check that what adapters have learned lies in the layers of the described model.

    Raises:
        ValueError: for prompts, which lie in peft's model around it.
    """
    for name in description.adapters:
        config = config_of(description, name)
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"export: what {type(config).__name__} of {name!r} learns is not in the layers of "
                f"{description.architecture}, but in the PeftModel around it; HuggingFaceExport writes it "
                "in a run, and so does save_pretrained(directory) of the PeftModel in on_train_end, on every rank"
            )


def write_adapters(model: PreTrainedModel, description: Description, fetch: Fetch, directory: Path | None) -> None:
    """Write what ``PeftModel.from_pretrained`` reads: the adapter "default" into ``directory``, others below it.

    Args:
        model: from :func:`with_adapters`.
        description: of it.
        fetch: returns the whole tensor of a name of ``model``; called for each in the same order in every process.
        directory: ``None``: this process takes part in ``fetch`` and writes nothing.
    """
    from peft import get_peft_model_state_dict

    for adapter in description.adapters:
        found = {name: fetch(name) for name in _of_adapter(model, adapter)}
        if directory is None:
            continue
        state = {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}
        shared = _shared_by_layers(model, state)
        config = config_of(description, adapter)
        state = get_peft_model_state_dict(model, state | shared, adapter, save_embedding_layers=False)
        beside = {name.removesuffix(f".{adapter}") for name in shared}
        target = directory if adapter == "default" else directory / adapter
        target.mkdir(parents=True, exist_ok=True)
        written = {name if name in beside else _PREFIX + name: tensor.clone() for name, tensor in state.items()}
        save_file(written, target / _FILE, {"format": "pt"})
        config.inference_mode, config.base_model_name_or_path = True, description.source
        config.save_pretrained(str(target))


def warn_of_what_stays_behind(model: PreTrainedModel, description: Description, unlike_files: Collection[str]) -> None:
    """Warn of weights of the base that adapters alone do not bring along.

    Args:
        model: from :func:`with_adapters`.
        description: of it.
        unlike_files: its parameters that train, or are not as in the files of the base; all of them: that is not known.
    """
    added = adapters_of(model)
    of_base = {name for name, parameter in model.named_parameters() if parameter not in added}
    written = {name for adapter in description.adapters for name in _of_adapter(model, adapter)}
    left = sorted(name_without_wrappers(name) for name in (of_base - written) & set(unlike_files))
    if left and not of_base <= set(unlike_files):
        warnings.warn(
            f"adapters are written without {len(left)} weights of the base that train beside them or were changed, "
            f"such as {left[0]}; who reads them has these as they are in {description.source or 'the base'}. Merge "
            "(HuggingFaceExport(merge=True), export --merge=true), or name their layers in modules_to_save",
            stacklevel=2,
        )


def warn_of_what_is_not_merged(description: Description) -> None:
    """Warn of adapters that a merged model goes without: those that were not in use, be it for a moment only."""
    left = [name for name in description.adapters if name not in description.active]
    if left:
        names = ", ".join(map(repr, description.active)) or "none"
        warnings.warn(
            f"merge: of {len(description.adapters)} adapters those are added that were in use in the end: {names}, "
            f"without {', '.join(map(repr, left))}. For others call set_adapter(NAME) before the checkpoint (in "
            "on_train_end, say), or export without merge, and use "
            "PeftModel.from_pretrained(base, its directory).merge_and_unload()",
            stacklevel=2,
        )


def _of_adapter(model: PreTrainedModel, adapter: str) -> Iterator[str]:
    """Yield the names of an adapter's parameters, and of biases of the base that it may have trained."""
    from peft import get_peft_model_state_dict

    names = {name: torch.empty(0) for name in model.state_dict()}
    asked = names | _shared_by_layers(model, names)
    state = get_peft_model_state_dict(model, asked, adapter, save_embedding_layers=False)
    kept = {id(tensor) for tensor in state.values()}
    return (name for name, tensor in names.items() if id(tensor) in kept)


def _shared_by_layers(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the buffers that layers share (the projections of VeRA), under the names that peft's model has for them.

    It holds them beside the layers, and asks for them there; in ``state`` they have names of layers only.
    """
    shared: dict[str, Tensor] = {}
    for owner, layer in model.named_modules():
        for kind, child in own_children(layer).items() if is_wrapper(layer) else ():
            keys = () if child is None or any(True for _ in child.parameters()) else own_buffers(child)
            for key in keys:
                if (name := f"{owner}.{kind}.{key}") in state:
                    shared.setdefault(f"{_BESIDE}{kind}.{key}", state[name])
    return shared


def merged(model: PreTrainedModel, fetch: Fetch) -> Fetch:
    """Turn whole tensors of an adapted model into those of the model without adapters, these merged.

    Args:
        model: from :func:`with_adapters`.
        fetch: as above, by names of ``model``; may return ``None`` in processes that write nothing.
    """
    wrappers = {name_without_wrappers(n): (n, m) for n, m in reversed(list(model.named_modules())) if is_wrapper(m)}
    layers: dict[str, dict[str, Tensor] | None] = {}
    check_mergeable(model)
    check_merges(model)
    _untie(model, wrappers)

    def fetch_merged(name: str) -> Tensor | None:
        owner = next((p for p in _prefixes(name) if p in wrappers), None)
        if owner is None:
            return fetch(name)
        within = name.removeprefix(f"{owner}.")
        prefix, wrapper = wrappers[owner]
        if "modules_to_save" in own_children(wrapper):
            return fetch(f"{prefix}.modules_to_save.{wrapper.active_adapters[0]}.{within}")
        if owner not in layers:
            layers.clear()  # names of one layer follow each other
            layers[owner] = _merge(prefix, wrapper, fetch)
        layer = layers[owner]
        return None if layer is None else layer[within]

    return fetch_merged


def check_mergeable(model: PreTrainedModel) -> None:
    """Check that adapters can be added to the weights of ``model``.

    Raises:
        ValueError: if these are quantized: the sum would be rounded, or be one that nobody trained with.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"merge: the base {source_of(model.config)!r} is quantized, and adapters that are added to it are rounded "
            "with it; export the adapters alone, and use PeftModel.from_pretrained(base, directory), or merge them "
            "into the base in full precision by merge_and_unload() of peft, which gives other numbers than training had"
        )


def _untie(model: PreTrainedModel, wrappers: Mapping[str, tuple[str, nn.Module]]) -> None:
    """Untie weights of ``model`` of which one place has an adapter of its own: they are two tensors from then on."""

    def held(name: str) -> set[int]:
        owner = next((prefix for prefix in _prefixes(name) if prefix in wrappers), None)
        return set() if owner is None else {id(parameter) for parameter in wrappers[owner][1].parameters()}

    if all(held(name) == held(twin) for name, twin in model.all_tied_weights_keys.items()):
        return
    say_untied(model)


def _merge(prefix: str, wrapper: nn.Module, fetch: Fetch) -> dict[str, Tensor] | None:
    """Merge one layer. Returns its tensors by names without wrappers, or ``None`` in processes that write nothing."""
    unfilled = dict(wrapper.named_parameters())
    buffers = {name: value for name, value in wrapper.state_dict(keep_vars=True).items() if name not in unfilled}
    values = {name: fetch(f"{prefix}.{name}") for name in (*unfilled, *buffers)}
    if any(values[name] is None for name in unfilled):
        return None
    # Copies: what is fetched may be the model's own memory (a replica on CPU), and merging adds in place.
    _fill(prefix, wrapper, {name: value.clone() for name, value in values.items() if value is not None})
    layer: Any = wrapper
    with _WithValues(prefix, wrapper):
        while is_wrapper(layer):
            single_tokens = own_children(layer).get("token_adapter")
            layer = layer if single_tokens is None else single_tokens
            layer.merge()
            layer = layer.base_layer
    result = {name: tensor.detach() for name, tensor in unwrapped(wrapper).state_dict(keep_vars=True).items()}
    _fill(prefix, wrapper, {**unfilled, **buffers})
    return result


def _fill(prefix: str, wrapper: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        owner, _, short = name.rpartition(".")
        module = wrapper.get_submodule(owner)
        held = module.get_parameter(short) if short in own_parameters(module) else module.get_buffer(short)
        if value.shape != held.shape:
            shapes = f"the shape {tuple(value.shape)}, and peft makes {tuple(held.shape)}"
            raise ValueError(
                f"{prefix}.{name} has {shapes} from the config in the checkpoint; was it changed after that?"
            )
        if isinstance(held, nn.Parameter):
            own_parameters(module)[short] = nn.Parameter(value, requires_grad=False)
        else:
            own_buffers(module)[short] = value


class _WithValues(TorchDispatchMode):
    """Refuses operations on tensors that no checkpoint has, and that the config of an adapter does not give.

    They are on the meta device here, and what else takes part may have values.
    """

    def __init__(self, prefix: str, wrapper: nn.Module) -> None:
        super().__init__()
        self.prefix, self.wrapper = prefix, wrapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises a ValueError if an operand has no values."""
        if any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs))):
            kind = type(self.wrapper)
            missing = next((name for name, buffer in self.wrapper.named_buffers() if buffer.is_meta), "a tensor")
            raise ValueError(
                f"merge: {missing} of {self.prefix} ({kind.__module__}.{kind.__name__}) is in no checkpoint; export "
                "the adapters alone, and use PeftModel.from_pretrained(base, directory).merge_and_unload()"
            )
        return func(*args, **(kwargs or {}))


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
