"""Tells weights that a model ties from those that its class ties and it holds apart: a head of the user's own."""

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.wrappers import without_wrappers


def untied_names(model: PreTrainedModel) -> set[str]:
    """Name the weights that the class of ``model`` ties to others, and that are tensors of their own in it, wrappers
    apart.

    ``tie_word_embeddings`` may still be true: transformers writes both, and does not tie what it reads unlike.
    """
    with without_wrappers(model):
        held = dict(model.named_parameters(remove_duplicate=False))
    return {n for n, twin in model.all_tied_weights_keys.items() if n in held and held[n] is not held.get(twin)}


def untie(model: PreTrainedModel, names: Collection[str]) -> None:
    """Give ``model``, which has no weights yet, tensors of their own in the places ``names``."""
    if not names:
        return
    for name in names:
        owner, _, short = name.rpartition(".")
        held = model.get_parameter(name)
        own_parameters(model.get_submodule(owner))[short] = nn.Parameter(torch.empty_like(held), held.requires_grad)
    model.all_tied_weights_keys = {n: twin for n, twin in model.all_tied_weights_keys.items() if n not in names}
    if not model.all_tied_weights_keys:
        say_untied(model)


def say_untied(model: PreTrainedModel) -> None:
    """Let the configs of ``model`` say that head and embedding are two tensors."""
    model.all_tied_weights_keys = {}
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
