"""Reads the tensor-parallel plan that a model publishes."""

from torch import nn
from transformers import PreTrainedModel

from lightning_automodel._compat.transformers.models import plan_of_class


def published_plan(model: nn.Module) -> dict[str, str]:
    """Collect the rules that the model brings: of models inside of it (with prefix), of its class, of the instance.

    transformers merges them when it builds a model; remote code does not always let it. What is no model of
    transformers may have a ``tp_plan``; the plans of diffusers are written for its own way of splitting.
    """
    own: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not isinstance(model, PreTrainedModel):
        return dict(own)
    inner = {
        f"{name}.{rule}": style
        for name, child in model.named_children()
        if isinstance(child, PreTrainedModel)
        for rule, style in (child.tp_plan or {}).items()
    }
    return {**inner, **plan_of_class(type(model)), **own}
