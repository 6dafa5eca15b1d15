"""Tells whether what a module computes is code that was compared with one process, or may be a user's.

There are two comparisons: of features and heads, for tensor parallelism (:func:`is_known`), and of tokens, for context
and sequence parallelism (:func:`is_measured`).

A user's may come as a class, as what is assigned to ``forward`` of a module or of a class, as a function in the place
of one that the code names, as an attention function that is registered with transformers, as a function among the
attributes of a module, or as a module of torch's that computes across features, where a model has an activation.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lightning_automodel._compat.transformers.models import attention_of
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.reachable_code import names_in

MEASURED = ("transformers", "diffusers")
"""Packages whose models are compared with one process, family by family (docs/families.md)."""
KNOWN = (*MEASURED, "torch", "torchao", "peft")
"""Packages whose modules do what their style says."""
_BESIDE = ("lightning_automodel", "functools", "builtins", "math", "typing", "collections", "numpy")
_AS_PLANNED = (nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.AlphaDropout)
_HOLDING = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
PLAIN = (*_AS_PLANNED, *_HOLDING)
"""Modules of torch's that treat every token alone, and features as a plan expects, or that only hold others."""
_TOKEN_BY_TOKEN = (
    *("transformers.", "torch.nn.", "peft.", "lightning_automodel."),
    *("torchao.", "bitsandbytes.", "liger_kernel."),  # linears and norms: they replace nothing else in blocks
)
_MODELS = "transformers.models."
_ACROSS = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.MultiheadAttention)


def package(module: nn.Module) -> str:
    """Return the package that defines a module's class."""
    return _package_of(type(module))


def is_known(module: nn.Module) -> bool:
    """Tell whether the forward pass of ``module`` itself, its children aside, is code of known packages."""
    return package(module) in KNOWN and all(_package_of(thing) in (*KNOWN, *_BESIDE) for thing in _runs(module))


def is_measured(module: nn.Module) -> bool:
    """Tell whether the forward pass of ``module`` is code whose tokens are compared with those of one process.

    Of transformers' models these are the ones that write text; others see, hear or forecast.
    """
    where = _where(module)
    is_of_model = where.startswith(_MODELS)
    return is_of_libraries(module) and (not is_of_model or where.split(".")[2] in _families_that_write())


def is_of_libraries(module: nn.Module) -> bool:
    """Tell whether the forward pass of ``module`` is code of transformers and of what extends it, and no user's."""
    return _where(module).startswith(_TOKEN_BY_TOKEN)


def _where(module: nn.Module) -> str:
    return getattr(code_of(module), "__module__", None) or ""


@functools.cache
def _families_that_write() -> frozenset[str]:
    """List the folders of transformers with a model of the tables (docs/families.md), or with an encoder beside one."""
    tables = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    return frozenset(model_type_to_module_name(family) for table in tables for family in table)


def functions_of_users(module: nn.Module) -> list[Any]:
    """List what can be called among the attributes of ``module``, modules aside, and comes from no known package."""
    known = {*KNOWN, *_BESIDE, *(name.partition(".")[0] for name in _TOKEN_BY_TOKEN)}
    functions = map(_without_partial, _callable_attributes(module))
    return [function for function in functions if _package_of(function) not in known]


def works_across_features(module: nn.Module) -> bool:
    """Tell whether a module of torch's computes with more than single features, or has a parameter for each."""
    if package(module) != "torch" or isinstance(module, PLAIN):
        return False
    if not is_activation(module) or isinstance(module, _ACROSS):
        return True
    return any(p.numel() > 1 for p in module.parameters())


def is_activation(module: nn.Module) -> bool:
    """Tell whether a module is one of torch's activations."""
    return type(module).__module__ == nn.GELU.__module__


def _runs(module: nn.Module) -> Iterator[Any]:
    """Yield the code of ``module``, what it names of its file, and what its attributes are that can be called."""
    forward = _without_partial(code_of(module))
    yield forward
    if inspect.isfunction(forward) and _package_of(forward) in MEASURED:
        for name in names_in(forward.__code__):
            value = forward.__globals__.get(name)
            if callable(value):
                yield value
    for value in _callable_attributes(module):
        yield value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    registered = AttentionInterface().get(attention_of(getattr(module, "config", None)))
    if registered is not None:
        yield inspect.unwrap(registered)


def _callable_attributes(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "forward" and callable(value):
            yield value


def _without_partial(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _package_of(thing: Any) -> str:
    name = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
    return "builtins" if name in sys.stdlib_module_names and name != "__main__" else name
