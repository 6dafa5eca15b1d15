"""Logits that are not computed: a tensor that knows how, and of which torch's functions make others, or a loss.

What a function gets, and where it is decided::

    shape, dtype, device                       the tensor
    scaling, soft-capping, casts               a recipe, which keeps them for each chunk       deferred_functions.py
    views, transposes, indices of positions    a recipe of other hidden states                 cut_logits.py
    cross entropy                              a loss, in chunks of positions                  linear_recipe.py
    all others, changes in place               an error
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map_only
from lightning_automodel.loss.calls import DESCRIPTIONS, name_of
from lightning_automodel.loss.deferred_functions import FUNCTIONS
from lightning_automodel.loss.linear_recipe import LinearRecipe

_DESCRIPTIONS = DESCRIPTIONS - {"data"}  # another tensor


class DeferredLogits(Tensor):
    """Stands for logits [batch, seq, vocab] between a head and the loss, with their shape, dtype and device.

    Its one element is not a number, for code that reads elements past torch's functions.
    """

    recipe: LinearRecipe

    @staticmethod
    def from_recipe(recipe: LinearRecipe) -> "DeferredLogits":
        """Make deferred logits of a ``recipe``: constants, where no gradients are recorded."""
        recipe = recipe if torch.is_grad_enabled() else recipe.detached()
        element = recipe.local.detach().new_full((), math.nan, dtype=recipe.dtype)
        deferred = element.expand(recipe.shape).as_subclass(DeferredLogits)
        deferred.recipe = recipe
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in FUNCTIONS:
            result = FUNCTIONS[name](func, *tree_map_only(DeferredLogits, lambda x: x.recipe, (args, kwargs)))
            if result is not NotImplemented:
                return tree_map_only(LinearRecipe, DeferredLogits.from_recipe, result)
        owner = next(x.recipe.owner for x in tree_leaves((args, kwargs)) if isinstance(x, DeferredLogits))
        raise ValueError(
            f"{owner} calls {name or func} on its logits, and a loss without logits knows only what treats each logit "
            "alone (scaling, soft-capping, casts), picks positions, and cross entropy of class ids that is summed or "
            "averaged, without weights of classes; use chunked_loss=None and loss_kernel='torch'"
        )
