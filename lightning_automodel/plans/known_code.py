"""Tells whether what a module computes is code that was compared with one process, or may be a user's.

There are two comparisons: of features and heads, for tensor parallelism (:func:`is_known`), and of tokens, for context
and sequence parallelism (:func:`is_measured`).

A user's may come as a class, as what is assigned to ``forward`` of a module or of a class, as a function or method in
the place of one that the code names, or that this one names, as an attention function that is registered with
transformers, as a function among the attributes of a module, or as a module or function of torch's that computes across
features, where a model has an activation. Each may stand around the one before, and have its name.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lightning_automodel._compat.transformers.models import attention_of
from lightning_automodel.modules.authors import links_of, place_of
from lightning_automodel.modules.forward import called_by, code_of
from lightning_automodel.modules.reachable_code import names_in

MEASURED = ("transformers", "diffusers")
"""Packages whose models are compared with one process, family by family (docs/families.md)."""
KNOWN = (*MEASURED, "torch", "torchao", "peft")
"""Packages whose modules do what their style says."""
_BESIDE = ("lightning_automodel", "functools", "builtins", "math", "typing", "collections", "numpy")
_AS_PLANNED = (nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.AlphaDropout)
_HOLDING = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_FUNCTIONS = (torch, nn.functional)
"""Where functions of torch stand that somebody may have put others in the place of."""
_METHODS = (FunctionType, MethodType, staticmethod, classmethod, functools.partial)
_ELEMENTWISE = {
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "sigmoid", "logsigmoid", "tanh"),
    *("softplus", "softsign", "hardtanh", "hardsigmoid", "hardswish", "square", "exp", "dropout"),
}
"""Functions of torch that treat every number alone."""
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
    is_elementwise = all(map(_takes_features_apart, _callable_attributes(module)))
    return (
        package(module) in KNOWN
        and is_elementwise
        and all(_package_of(link) in (*KNOWN, *_BESIDE) for link in _runs(module, _registered_for(module)))
    )


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
    return place_of(code_of(module))


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
    """List what ``module`` runs and what comes from no known package, or is a function of torch's across features.

    Attention functions that are registered with transformers aside.
    """
    known = {*KNOWN, *_BESIDE, *(name.partition(".")[0] for name in _TOKEN_BY_TOKEN)}
    of_users = [link for link in _runs(module, registered=None) if _package_of(link) not in known]
    return of_users + [value for value in _callable_attributes(module) if not _takes_features_apart(value)]


def is_own_attention(name: str | None) -> bool:
    """Tell whether the attention function ``name`` is transformers' own: somebody may have registered another one."""
    registered = AttentionInterface().get(name)
    return registered is None or all(_package_of(link) == "transformers" for link in links_of(registered))


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


def _registered_for(module: nn.Module) -> Any:
    """Return the attention function of users and transformers that ``module`` calls by a name of its config."""
    return AttentionInterface().get(attention_of(getattr(module, "config", None)))


def _runs(module: nn.Module, registered: Any) -> Iterator[Any]:
    """Yield the code of ``module``, what it names of its files and methods, and its attributes that can be called.

    With all that decorators have put around each; functions of transformers are followed to those that they name.
    """
    waiting = [(called_by(module), True), *((value, False) for value in _callable_attributes(module))]
    waiting += [] if registered is None else [(registered, False)]
    seen: set[int] = set()
    while waiting:
        function, is_method = waiting.pop()
        for link in links_of(function):
            if id(link) not in seen:
                seen.add(id(link))
                yield link
                if inspect.isfunction(link) and _package_of(link) in MEASURED:
                    waiting += _named_in(link, module if is_method else None)


def _named_in(function: FunctionType, module: nn.Module | None) -> Iterator[tuple[Any, bool]]:
    """Yield what ``function`` may call: globals of its file, functions of torch, and, of a method, its like.

    Each with whether it is a method of ``module``.
    """
    for name in names_in(function.__code__):
        values = [function.__globals__.get(name), *(vars(place).get(name) for place in _FUNCTIONS)]
        yield from ((value, False) for value in values if callable(value) and not isinstance(value, nn.Module))
        if module is not None:
            own = vars(module).get(name, inspect.getattr_static(type(module), name, None))
            own = own.fget if isinstance(own, property) else own
            if isinstance(own, _METHODS):
                yield own, True


def _callable_attributes(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "forward" and callable(value):
            yield value


def _takes_features_apart(function: Any) -> bool:
    """Tell whether a function among the attributes of a module is no function of torch's across features."""
    links = list(links_of(function))
    if any(isinstance(link, torch.jit.ScriptFunction) for link in links):  # whose code is not seen
        return False
    of_torch = [link for link in links if inspect.isroutine(link) and _package_of(link) in ("torch", "builtins")]
    return all(getattr(link, "__name__", "") in _ELEMENTWISE for link in of_torch)


def _package_of(thing: Any) -> str:
    name = place_of(thing).partition(".")[0]
    return "builtins" if name in sys.stdlib_module_names and name != "__main__" else name
