"""Prompts that peft reads past the forward pass of their encoder (of saved adapters), and models without theirs."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.modules.wrappers import TASKS

_PROMPTS = "prompt_encoder"
"""Where peft's models hold encoders, by the names of adapters."""


_KEPT: ContextVar[dict[Any, Tensor] | None] = ContextVar("prompts_of_a_generation", default=None)


@contextmanager
def keeping_prompts() -> Generator[None, None, None]:
    """Read a prompt once within this context: a model without a cache asks for it before each token of ``generate``,
    and ranks that share its encoder's shards ask unlike often.
    """
    before = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(before)


def install_reading_of_prompts(root: nn.Module) -> None:
    """Let models of peft below ``root`` read a saved prompt in a pass of its encoder, in which its shards are whole.

    Where ``disable_adapter()`` leaves prompts out, they call the model that they hold.
    """
    for module in root.modules():
        if _PROMPTS in own_children(module) and hasattr(module, "get_prompt"):
            module.get_prompt = MethodType(_get_prompt, module)  # type: ignore[assignment]
            module.disable_adapter = MethodType(_disable_adapter, module)  # type: ignore[assignment]


def _get_prompt(model: Any, *args: Any, **kwargs: Any) -> Any:
    kept, asked = _KEPT.get(), (id(model), model.active_adapter, args, tuple(kwargs.items()))
    if kept is not None and asked in kept:
        return kept[asked]
    prompt = _read_prompt(model, *args, **kwargs)
    if kept is not None and isinstance(prompt, Tensor):  # a cache of keys and values grows
        kept[asked] = prompt
    return prompt


def _read_prompt(model: Any, *args: Any, **kwargs: Any) -> Any:
    config, name = model.active_peft_config, model.active_adapter
    if not config.inference_mode or config.peft_type == TASKS:  # which calls its encoder
        return type(model).get_prompt(model, *args, **kwargs)
    children, encoders = own_children(model), model.prompt_encoder
    read = SimpleNamespace(embedding=SimpleNamespace(weight=_read(encoders[name])))
    children[_PROMPTS] = {name: read}  # type: ignore[assignment]
    try:
        return type(model).get_prompt(model, *args, **kwargs)
    finally:
        children[_PROMPTS] = encoders


@contextmanager
def _disable_adapter(model: Any) -> Generator[None, None, None]:
    with type(model).disable_adapter(model):
        if model.active_peft_config.is_prompt_learning:
            model.forward = model.base_model.__call__  # peft takes its forward, past the hooks that put slices in place
        yield


def _read(encoder: Any) -> Tensor:
    """Return the whole table of ``encoder``, float [tokens, width], with a graph."""
    before, table = vars(encoder).get("forward"), encoder.embedding
    if not isinstance(table, nn.Embedding):  # a cartridge: its pass gives all of it, for each row
        return encoder(torch.zeros(1, 1))[0]
    encoder.forward = table.forward  # where an encoder is the unit, its table alone would be a shard
    try:
        return encoder(torch.arange(table.num_embeddings, device=table.weight.device))
    finally:
        del encoder.forward
        if before is not None:
            encoder.forward = before
