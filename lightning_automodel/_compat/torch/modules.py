"""Private names of torch's modules: the tables that public methods read, and write with checks only."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _of_all
from torch.nn.modules.module import _IncompatibleKeys


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the table of the parameters that ``module`` holds itself, to read and to write.

    Assigning to an attribute refuses tensors that are no parameters, and FSDP2 and others take notice of it.
    """
    return module._parameters


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Lists what ``module.parameters()`` yields, in its order, in half of its time: it makes no names.

    For what is asked several times in each step.
    """
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for parameter in current._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
        for child in reversed(current._modules.values()):
            if child is not None:
                waiting.append(child)
    return list(found.values())


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the table of the buffers that ``module`` holds itself, to read and to write."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the table of the modules that ``module`` holds itself, to read and to write.

    Looking at the table finds no module by an attribute that a wrapper hands on to what it wraps.
    """
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Tells whether a buffer of ``module`` is part of its state dict."""
    return buffer not in module._non_persistent_buffers_set


def load_hooks_of_users(module: nn.Module) -> list[str]:
    """List hooks that change a state dict before ``module`` loads it, but for torch's own; nothing public tells."""
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    kinds = (getattr(hook, "func", hook) for hook in hooks)
    return [kind.__qualname__ for kind in kinds if not getattr(kind, "__module__", "torch").startswith("torch.")]


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """Makes what ``load_state_dict`` returns."""
    return _IncompatibleKeys(missing, unexpected)


def remove_hooks(module: nn.Module) -> None:
    """Takes away what runs before and after the forward pass of ``module``; torch removes hooks by their handles."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns what runs before and after the forward pass of ``module``."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def hook_tables_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the tables of what runs before and after the forward pass of ``module``."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hooks_of(module: nn.Module) -> list[Any]:
    """Returns what runs before and after the backward pass of ``module``."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def hooks_around_all_modules() -> tuple[list[Any], list[Any]]:
    """Returns what ``torch.nn.modules.module.register_module_*_hook`` has around forward and around backward passes."""
    forward = [*_of_all._global_forward_pre_hooks.values(), *_of_all._global_forward_hooks.values()]
    return forward, [*_of_all._global_backward_pre_hooks.values(), *_of_all._global_backward_hooks.values()]


def hooks_of_gradients_of_inputs(module: nn.Module) -> list[Any]:
    """Returns what runs on the gradients of what enters ``module``."""
    return list(module._backward_hooks.values())


def lay_hooks_in_order(module: nn.Module) -> None:
    """Stores the hooks around the forward pass of ``module`` in the order in which they run, prepended ones first."""
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in tables:
        in_order = list(hooks.items())
        hooks.clear()
        hooks.update(in_order)


def gradient_hooks_of(parameter: nn.Parameter) -> list[Any]:
    """Returns what ``parameter.register_hook`` was given."""
    return list((parameter._backward_hooks or {}).values())


def hooks_after_accumulation(parameter: nn.Parameter) -> list[Any]:
    """Returns what ``parameter.register_post_accumulate_grad_hook`` was given."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def wrap_gradient_hooks(parameter: nn.Parameter, wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap(hook)`` in the place of each hook that ``parameter.register_hook`` was given: in the very dict, of
    which the handles of users remove it.
    """
    _wrap_all(parameter._backward_hooks, wrap)


def wrap_hooks_after_accumulation(parameter: nn.Parameter, wrap: Callable[[Any], Any]) -> None:
    """Do the same with what ``parameter.register_post_accumulate_grad_hook`` was given."""
    _wrap_all(parameter._post_accumulate_grad_hooks, wrap)


def _wrap_all(hooks: dict[int, Any] | None, wrap: Callable[[Any], Any]) -> None:
    for key, hook in (hooks or {}).items():
        assert hooks is not None
        hooks[key] = wrap(hook)


@contextmanager
def hooks_after_accumulation_kept(model: nn.Module) -> Generator[None, None, None]:
    """Let parameters that are put in the place of others, within this context, have the hooks that these were given by
    ``register_post_accumulate_grad_hook``: the very dict, of which the handles of users remove them.
    """
    before = {n: h for n, p in model.named_parameters() if (h := p._post_accumulate_grad_hooks)}
    yield
    for name, parameter in model.named_parameters() if before else ():
        if name in before:
            parameter._post_accumulate_grad_hooks = before[name]


def have_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Tells whether any of ``parameters`` has a hook of either kind."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
