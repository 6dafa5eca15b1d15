"""Private names of transformers, each with its reason: records of forward passes, and the test for packed rows."""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils, modeling_flash_attention_utils
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, _active_collector, maybe_install_capturing_hooks

_TEST_OF_PACKING = modeling_flash_attention_utils._is_packed_sequence
_DOCUMENTS_OF_ROWS = masking_utils.find_packed_sequence_indices


def plan_of_class(kind: type[PreTrainedModel]) -> dict[str, str]:
    """Return the tensor-parallel plan that a class declares for itself; instances show a merged one only."""
    return kind._tp_plan or {}


def checkpoints_with_cache(layer: nn.Module) -> bool:
    """Tells whether a layer of transformers may be recomputed while it writes a cache."""
    return bool(getattr(layer, "_can_checkpoint_with_cache", False))


def loss_that_was_set(model: nn.Module) -> Any:
    """Return what somebody has set as ``model.loss_function``; asked for that, bodies of models warn of their name."""
    return getattr(model, "_loss_function", None) if isinstance(model, PreTrainedModel) else None


def record_as_before(model: nn.Module) -> None:
    """Lets a model record hidden states and attention maps when its class was replaced by a subclass.

    transformers looks up what a model records by the text of its class, and finds nothing under that of a subclass made
    at run time: ``output.hidden_states`` would be ``None``.
    """
    if isinstance(model, PreTrainedModel):
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)


def let_layers_be_skipped(model: nn.Module) -> None:
    """Lets encoders of transformers skip layers (``layerdrop``) where FSDP2 holds them, as on one process.

    They run all layers where torch has marked them as FSDP's, since ranks that skip other layers than their peers wait
    for these. Ours skip the same.
    """
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "is_fsdp_managed_module" in code.co_names:
            module._is_fsdp_managed_module = False  # type: ignore[assignment]


def recordings_of_call() -> dict[str, list]:
    """Returns what transformers records inside of blocks during the present call of a model, by key."""
    active = _active_collector.get() or {}
    return {key: x for key, x in active.items() if isinstance(x, list) and key != "hidden_states"}


def recorded_outputs(model: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, str, int]]:
    """Returns the modules whose output transformers records, under which key, and its index in what they return.

    Keys are those that end with ``kind``: ``router_logits``; ``attentions``, and so ``cross_attentions``.

    transformers keeps the rule in private registries and installs its hooks with the first forward pass. They are
    installed now, so that hooks of ours can stand before and after them.
    """
    if isinstance(model, PreTrainedModel):
        _install_capturing_hooks(model)
    for name, module in model.named_modules():
        for _, hook in _capturing_hooks(module):
            variables = inspect.getclosurevars(hook).nonlocals
            if variables["key"].endswith(kind):
                yield name, module, variables["key"], variables["index"]


def _install_capturing_hooks(model: PreTrainedModel) -> None:
    """Install them once: a pass that the model made before has installed those of a part of it, which is not asked."""
    if not getattr(model, _INSTALLED, False):
        for module in model.modules():
            for number, _ in _capturing_hooks(module):
                del module._forward_hooks[number]
            vars(module).pop(_INSTALLED, None)
    maybe_install_capturing_hooks(model)


def _capturing_hooks(module: nn.Module) -> list[tuple[int, Callable]]:
    hooks = module._forward_hooks.items()
    return [(number, hook) for number, hook in hooks if getattr(hook, "__name__", "") == "output_capturing_hook"]


_INSTALLED = "_output_capturing_hooks_installed"


@contextmanager
def without_recordings() -> Generator[None, None, None]:
    """Let transformers record nothing of what runs within this context."""
    before = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(before)


@contextmanager
def recording_inside_graph(recorded: dict[str, list]) -> Generator[None, None, None]:
    """Makes transformers record into ``recorded`` inside of a compiled graph, within this context.

    Its context variable cannot be traced; it reads plain attributes where the whole model is compiled.
    """
    _active_collector.compiling, _active_collector.global_var = True, recorded or None
    try:
        yield
    finally:
        _active_collector.compiling, _active_collector.global_var = False, None


_WHERE_FOUND: ContextVar[Callable[[], None] | None] = ContextVar("what runs where packed documents are found")


@contextmanager
def where_documents_are_found(run: Callable[[], None]) -> Generator[None, None, None]:
    """Call ``run()`` where transformers' masks find packed documents within this context.

    Nothing public tells that they do, and to look once more would wait for the device.
    """
    token = _WHERE_FOUND.set(run)
    try:
        yield
    finally:
        _WHERE_FOUND.reset(token)


def _documents_of_rows(position_ids: Tensor) -> Tensor | None:
    found = _DOCUMENTS_OF_ROWS(position_ids)
    if found is not None and (run := _WHERE_FOUND.get(None)) is not None:
        run()
    return found


def set_test_of_packing(active: bool) -> None:
    """Turns transformers' tests of packed documents on or off, for the whole process.

    They read positions on the host, for the masks of every forward pass and in every layer of flash attention, and
    nothing tells them beforehand.
    """
    test = _TEST_OF_PACKING if active else (lambda position_ids, batch_size: False)
    documents = _documents_of_rows if active else (lambda position_ids: None)
    modeling_flash_attention_utils._is_packed_sequence = test
    masking_utils.find_packed_sequence_indices = documents


# ---- weights ---------------------------------------------------------------------------------------------------------


def is_initialized(tensor: Tensor) -> bool:
    """Tells whether transformers takes the values of ``tensor`` for read, so that initialization leaves them."""
    return getattr(tensor, "_is_hf_initialized", False)


def mark_as_initialized(tensor: Tensor) -> None:
    """Lets initialization leave the values of ``tensor``."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def kept_in_float16_models(model: nn.Module) -> tuple[str, ...]:
    """Returns what the names of parameters contain that stay in float32 in a model in float16."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def kept_in_all_models(model: nn.Module) -> tuple[str, ...]:
    """Returns what the names of parameters contain that stay in float32 in a model of any dtype.

    diffusers says so in the attribute that for transformers concerns float16 only; there, both exist.
    """
    lenient = getattr(model, "_keep_in_fp32_modules", None)
    return tuple(getattr(model, "_keep_in_fp32_modules_strict", lenient) or ())


def saves_more_than_weights(model: PreTrainedModel) -> bool:
    """Tells whether ``save_pretrained`` writes something else than all weights and the config: adapters, code,
    quantization.
    """
    flags = ("_hf_peft_config_loaded", "hf_quantizer", "_keys_to_ignore_on_save")
    return any(getattr(model, flag, None) for flag in flags) or model.is_remote_code()


# ---- configs ---------------------------------------------------------------------------------------------------------


def source_of(config: PreTrainedConfig) -> str:
    """Returns the directory or name from which a model was loaded, or nothing."""
    return str(getattr(config, "_name_or_path", "") or "")


def attention_of(config: Any) -> str | None:
    """Returns the name of the attention function that a model with this config uses."""
    return getattr(config, "_attn_implementation", None)


def use_kernels_without_memory(config: PreTrainedConfig) -> None:
    """Chooses attention and experts that run on meta: what they draw is as large as what others draw."""
    if attention_of(config) not in (None, "eager", "sdpa"):
        config._attn_implementation = "sdpa"
    if getattr(config, "_experts_implementation", None) is not None:
        config._experts_implementation = "batched_mm"  # the only one that looks at no values, for all dtypes


def use_kernels_with_formulas(config: Any) -> None:
    """Chooses attention and experts of products whose operations torch can count."""
    if isinstance(config, PreTrainedConfig):
        config._attn_implementation = "eager"
        config._experts_implementation = "batched_mm"


@contextmanager
def experts_run_eagerly(module: nn.Module) -> Generator[None, None, None]:
    """Makes a module of experts compute by its own code within this context, whatever kernels its config asks for."""
    config = getattr(module, "config", None)
    before = getattr(config, "_experts_implementation", None)
    if before is not None:
        config._experts_implementation = "eager"  # type: ignore[union-attr]
    try:
        yield
    finally:
        if before is not None:
            config._experts_implementation = before  # type: ignore[union-attr]


def checkpoint_function(layer: nn.Module, default: Callable) -> Callable:
    """Returns what ``layer`` would checkpoint with, as ``gradient_checkpointing_enable`` set it."""
    return getattr(layer, "_gradient_checkpointing_func", default)
