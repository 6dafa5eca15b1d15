"""Hooks that a user put on a model before it was made parallel: those that would see a part, or never run."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_automodel._compat.torch.modules import (
    backward_hooks_of,
    gradient_hooks_of,
    hook_tables_of,
    hooks_after_accumulation,
    hooks_around_all_modules,
    hooks_of,
    hooks_of_gradients_of_inputs,
)
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.authors import links_of, place_of

_LIBRARIES = {
    *("accelerate", "lightning", "lightning_automodel", "megatron_fsdp"),
    *("peft", "torch", "torchao", "transformers", "functools", "builtins"),
}
_OF_ALL_MODULES = "a hook of all modules (torch.nn.modules.module.register_module_...)"


_PARTS = "_where_hooks_see_parts"
_OF_LAYERS = "of whole attention and feed-forward layers, and of blocks,"
WHOLE = (f"Outputs {_OF_LAYERS}", f"Gradients {_OF_LAYERS}")
_INSTEAD = (
    "change gradients in on_before_optimizer_step of the LightningModule (before clipping: in on_after_backward of the "
    "last micro-batch), or use DDPStrategy"
)


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse ``parameter.register_hook(...)`` on parameters that are replaced, and whose gradients are not autograd's.

    Raises:
        ValueError: naming the parameter.
    """
    for name, parameter in model.named_parameters():
        # Those of adapters change gradients (OSF projects them), too.
        if any(is_of_user(hook) or "peft" in map(_library_of, links_of(hook)) for hook in gradient_hooks_of(parameter)):
            raise ValueError(
                f"{name} has a hook (register_hook) that would never run: sharding replaces parameters, and writes "
                f"their reduced gradients itself; {_INSTEAD}"
            )


def find_hook_after_accumulation(model: nn.Module) -> str | None:
    """Find a parameter with a hook of a user's that runs when its gradient was added to those of the step so far."""
    return next((n for n, p in model.named_parameters() if any(map(is_of_user, hooks_after_accumulation(p)))), None)


def refuse_hooks_after_accumulation(model: nn.Module, why: str) -> None:
    """Refuse ``parameter.register_post_accumulate_grad_hook(...)``.

    Raises:
        ValueError: naming the parameter, and ``why``.
    """
    if name := find_hook_after_accumulation(model):
        raise ValueError(f"{name} has a hook (register_post_accumulate_grad_hook): {why}; {_INSTEAD}")


def warn_of_parts(
    model: nn.Module,
    seeing_parts: Sequence[str],
    why: str,
    whole: tuple[str, str] = WHOLE,
    terms: Sequence[str] = (),
) -> None:
    """Warn once of hooks that will see a rank's part of what they see on one process.

    Args:
        model: with the hooks of its user; :func:`warn_of_later_hooks` looks again.
        seeing_parts: names of modules inside of which, or behind which, values are split.
        why: what splits them.
        whole: which outputs, and which gradients, are those of one process.
        terms: names of modules whose outputs are whole, and the gradients of what enters them a rank's terms of a sum.
    """
    vars(model).setdefault(_PARTS, []).append((seeing_parts, why, whole, terms))
    forward, backward = (
        [_OF_ALL_MODULES] if seeing_parts and any(map(is_of_user, hooks)) else []
        for hooks in hooks_around_all_modules()
    )
    forward += [name for name in seeing_parts if any(map(is_of_user, hooks_of(model.get_submodule(name))))]
    backward += [name for name in seeing_parts if any(map(is_of_user, backward_hooks_of(model.get_submodule(name))))]
    entering = ((name, hooks_of_gradients_of_inputs(model.get_submodule(name))) for name in terms)
    backward += [name for name, hooks in entering if any(map(is_of_user, hooks))]
    if forward:
        warn_once(
            f"{_first(forward)}: a forward hook of yours will see a rank's part of the values there ({why}); what it "
            f"computes from them is not what one process computes. {whole[0]} are whole"
        )
    if backward:
        warn_once(
            f"{_first(backward)}: a backward hook of yours will see a rank's part of the gradients there ({why}); what "
            f"it computes from them is not what one process computes. {whole[1]} are whole"
        )


def warn_of_later_hooks(module: nn.Module) -> None:
    """Look again at the models in ``module`` that were made parallel: hooks may have come since."""
    for model in module.modules():
        for arguments in vars(model).pop(_PARTS, ()):
            warn_of_parts(model, *arguments)


def _first(names: Sequence[str]) -> str:
    return f"{names[0] or 'the model'}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def is_of_user(hook: Any) -> bool:
    """Tell whether a hook is none of a library's, this one included; decorators and partial functions aside."""
    return not _LIBRARIES.issuperset(map(_library_of, links_of(hook)))


def _library_of(link: Any) -> str:
    return place_of(link).partition(".")[0]


@contextmanager
def without_hooks_of_users(modules: Iterable[nn.Module]) -> Generator[None, None, None]:
    """Take the hooks that a user has around the forward passes of ``modules`` away within this context."""
    found: list[tuple[dict, dict]] = [(table, dict(table)) for m in modules for table in hook_tables_of(m) if table]
    for table, before in found:
        for key in [key for key, hook in before.items() if is_of_user(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, before in found:
            now = dict(table)
            table.clear()
            table.update(before | now)
