"""Refuses gradients of gradients of a model whose parameters FSDP2 gathers.

The graph that the first backward pass builds holds parameters that FSDP2 frees behind it: on CPU the second one ends
the process, and with parameters kept, embeddings have no gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_automodel._compat.pytree import tree_leaves
from lightning_automodel.distributed.second_order import refuse_second_order


def refuse_gathered(model: nn.Module) -> None:
    """Refuse ``create_graph=True`` in backward passes from what ``model``, an FSDP2 root, returns from now on."""
    model.register_forward_hook(_watch)


def _watch(module: nn.Module, args: tuple, output: Any) -> None:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    differentiable = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if differentiable:
        register_multi_grad_hook(differentiable, _check, mode="any")


def _check(grad: Tensor) -> None:
    refuse_second_order(
        "a model that FSDP2 shards over data ranks", "use DDPStrategy, or one data rank (tp alone splits it)"
    )
