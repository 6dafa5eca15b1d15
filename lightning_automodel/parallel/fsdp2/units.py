"""Chooses the modules that FSDP2 gathers together (its units), and which of them it frees after their forward pass."""

from collections.abc import Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss.install import defers_logits
from lightning_automodel.modules.structure import class_names, find_independent_blocks, find_input_embedding, outermost


def blocks_of_their_own(model: nn.Module, towers: dict[str, nn.Module], config: FSDP2Config) -> dict[str, nn.Module]:
    """Find the blocks that FSDP2 gathers alone: those of towers only if their policy is ``per_layer``."""
    blocks = find_independent_blocks(model)
    if config.tower_policy == "per_layer":
        return blocks
    return {name: block for name, block in blocks.items() if outermost(list(towers), name) is None}


def reshards(
    unit: dict[str, nn.Module], config: FSDP2Config, first_in_backward: Set[str], head: dict[str, nn.Module]
) -> bool | int:
    """Tell whether ``unit`` is freed after its forward pass: not if the backward pass begins with it."""
    if defers_logits(config) and not head.keys().isdisjoint(unit):
        return False  # the loss reads it when its own forward is over
    if config.reshard_after_forward is not None:
        return config.reshard_after_forward
    return first_in_backward.isdisjoint(unit)


def group_blocks(
    model: nn.Module, blocks: dict[str, nn.Module], min_num_params: int | None
) -> list[dict[str, nn.Module]]:
    """Groups ``blocks`` into units: one each, or one for as many of a list as hold ``min_num_params``, in order.

    Whole parameters count: all ranks of tensor parallelism must agree. A small rest of a list joins the unit before it.

    Raises:
        ValueError: for a minimum without blocks.
    """
    if min_num_params is not None and not blocks:
        raise ValueError(
            f"fsdp2_min_num_params={min_num_params} groups repeated blocks, and {class_names(model)[0]} has none that "
            "FSDP2 gathers alone; leave it at None"
        )
    units: list[dict[str, nn.Module]] = []
    for _, names in groupby(blocks, key=lambda name: name.rpartition(".")[0]):
        of_list: list[dict[str, nn.Module]] = [{}]
        for name in names:
            if of_list[-1] and _size(of_list[-1]) >= (min_num_params or 0):
                of_list.append({})
            of_list[-1][name] = blocks[name]
        if len(of_list) > 1 and _size(of_list[-1]) < (min_num_params or 0):
            of_list[-2].update(of_list.pop())
        units += of_list
    return units


def parameters_of(unit: dict[str, nn.Module]) -> list[nn.Parameter]:
    """List the parameters of a unit once."""
    return [p for module in unit.values() for p in module.parameters()]


def _size(unit: dict[str, nn.Module]) -> int:
    return sum(p.numel() for p in parameters_of(unit))


def differentiate_stream(model: nn.Module, towers: dict[str, nn.Module]) -> None:
    """Let the residual stream require a gradient whether a batch has images or not, where what makes features trains.

    FSDP2 reduces a block when the gradient of its input is there, and what has no such input in the end. Behind a
    frozen embedding the first block has one with images only: ranks would reduce in different orders, and wait, or
    take one tensor for another::

        images on GPU 0         GPU 0                 GPU 1, text only
        first block's input     requires a gradient   does not
        reduced                 block 1, 0, the rest  block 1, the rest, 0
    """
    embedding = find_input_embedding(model) if isinstance(model, PreTrainedModel) else None
    blocks = [name for name in find_independent_blocks(model) if outermost(list(towers), name) is None]
    outside = [module for name, module in model.named_modules() if outermost(blocks, name) is None]

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.requires_grad or not torch.is_grad_enabled():
            return output
        trains = any(p.requires_grad for m in outside for p in own_parameters(m).values() if p is not None)
        return output.requires_grad_().clone() if trains else output  # models write features into it

    if embedding is not None:
        embedding.register_forward_hook(hook)
