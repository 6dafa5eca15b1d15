"""Runs an encoder that is called by itself inside of a forward pass of its model, whose hooks put parameters in place.

::

    model.generate(...)    encoder(ids)  -->  model(ids): its hooks gather --> the encoder's own forward --> its hooks
                           model(decoder_input_ids, encoder_outputs=...)       one token after the other
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.structure import find_encoder

_MODEL = "_model_of_this_encoder"
_RUNNING = "_forward_pass_is_running"
_INSTEAD = "_forward_of_the_encoder_instead"


def run_encoder_inside(model: nn.Module) -> None:
    """Make calls of the encoder that ``model`` or a part of it generates with gather what they need.

    A model without such an encoder stays as it is.
    """
    encoder = find_encoder(model)
    if encoder is None:
        return
    encoder.__dict__[_MODEL] = model  # no child, and a deep copy of the model has its own
    wrap_forward(model, _around_model)
    wrap_forward(encoder, _around_encoder)


def _around_model(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    instead = model.__dict__.pop(_INSTEAD, None)
    if model.__dict__.get(_RUNNING):
        return forward(*args, **kwargs)
    model.__dict__[_RUNNING] = True
    try:
        return (instead or forward)(*args, **kwargs)
    finally:
        model.__dict__[_RUNNING] = False


def _around_encoder(encoder: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    model = encoder.__dict__[_MODEL]
    if model.__dict__.get(_RUNNING):
        return forward(*args, **kwargs)
    model.__dict__[_INSTEAD] = forward
    try:
        return model(*args, **kwargs)
    finally:
        model.__dict__.pop(_INSTEAD, None)
