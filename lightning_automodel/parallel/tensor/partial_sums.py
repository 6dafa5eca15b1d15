"""Proves in the first forward pass that what a boundary child returns is a sum over the tp ranks, or raises.

A boundary child is ``sum_r f(slices of rank r)``; all gradients then follow, because a sum is linear. It is one if all
that comes behind its row-wise members is linear (the rules are in :mod:`linearity`)::

    row-wise members, experts        ->  partial sum
    partial + partial                ->  partial sum
    partial x whole, moved, cast     ->  partial sum
    partial + whole                  ->  error: every rank would add the whole value
    any other function of a partial  ->  error: f(a) + f(b) is not f(a + b)

Operations are watched from the first row-wise member to the end of the child, once in training and once in evaluation.
In these passes blocks run uncompiled. What a kernel writes into memory that it allocates is not followed.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.torch.tensors import base_of
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.parallel.tensor.cut_features import CutFeatures
from lightning_automodel.parallel.tensor.trials import Trial
from lightning_automodel.plans import Layout
from lightning_automodel.plans.linearity import Kind, NotASumError, NotLinearError, kind, kind_of_result, mark, tensors
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import Leave
from lightning_automodel.plans.sum_terms import Term

_LEFT = "_boundaries_that_are_not_followed_yet"
_UNTRIED = "_modules_that_are_not_tried_yet"
_FROM_START = "_partial_sums_are_followed_from_the_start"
_watched: set[nn.Module] = set()


def is_followed(block: nn.Module) -> bool:
    """Tells whether operations in ``block`` are being watched, so that it is not to be compiled."""
    return bool(_watched) and any(module in _watched for module in block.modules())


def follow_partial_sums(model: nn.Module, layout: Layout, trials: Sequence[Trial] = ()) -> None:
    """Follows the first forward pass of ``model`` in training, and the first in evaluation, from now on.

    It raises a ``ValueError`` that names the module, the operation and the way out where a boundary child of
    ``layout.terms`` is no sum. Where there is none, nothing is installed.

    Args:
        model: that was split.
        layout: of ``model``.
        trials: of modules that run with other weights as well, once.
    """
    if not layout.terms and not trials:
        return
    model.__dict__[_LEFT] = {True: set(layout.terms), False: set(layout.terms)}
    model.__dict__[_UNTRIED] = {trial.name for trial in trials}

    def around(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        left: set[str] = model.__dict__[_LEFT][model.training]
        untried: set[str] = model.__dict__[_UNTRIED]
        if not left and not untried:
            return forward(*args, **kwargs)
        watches = [_Watch(model, name, layout) for name in sorted(left)]
        with _tried(model, [trial for trial in trials if trial.name in untried], untried), _installed(watches):
            output = forward(*args, **kwargs)
        left -= {watch.name for watch in watches if watch.proved}
        return output

    wrap_forward(model, around)


@contextmanager
def _tried(model: nn.Module, trials: Sequence[Trial], untried: set[str]) -> Generator[None, None, None]:
    """Install ``trials`` within this context; their names leave ``untried``.

    They run behind the hooks of :class:`_Watch`, which are prepended later and end what they watch.
    """
    modules = {model.get_submodule(trial.name) for trial in trials} - _watched
    _watched.update(modules)
    try:
        with ExitStack() as stack:
            for trial in trials:
                stack.callback(trial.install(model.get_submodule(trial.name), untried).remove)
            yield
    finally:
        _watched.difference_update(modules)


@contextmanager
def _installed(watches: list["_Watch"]) -> Generator[None, None, None]:
    """Install the hooks that watch one forward pass of the model, within this context."""
    modules = {watch.module for watch in watches} - _watched
    _watched.update(modules)
    try:
        with ExitStack() as stack:
            for watch in watches:
                for handle in watch.install():
                    stack.callback(handle.remove)
            yield
    finally:
        _watched.difference_update(modules)
        for watch in reversed(watches):
            watch.end()


class _Watch(TorchFunctionMode):
    """Follows the partial sums of one boundary child."""

    def __init__(self, model: nn.Module, boundary: str, layout: Layout) -> None:
        super().__init__()
        self.name, self.module = boundary, model.get_submodule(boundary)
        self.terms = {name: (model.get_submodule(name), term) for name, term in layout.terms[boundary].items()}
        self._cut_features = CutFeatures(boundary, self.module, list(_column_wise(model, boundary, layout)))
        self._all_outputs = boundary in layout.modules and layout.modules[boundary].leave is Leave.REDUCE_ALL
        self.proved = False
        self._term, self._active, self._inside = "", False, 0
        self._buffers = {id(buffer) for buffer in self.module.buffers()}

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def install(self) -> Iterator[RemovableHandle]:
        """Installs the first hook of the child's output, which sees it before it is summed over the ranks."""
        yield from self._cut_features.install()
        yield self.module.register_forward_pre_hook(self._enter_child)
        yield self.module.register_forward_hook(self._leave_child, prepend=True, always_call=True)
        for name, (member, term) in self.terms.items():
            enter = partial(self._enter_term, name, term)
            yield member.register_forward_pre_hook(enter, with_kwargs=True)
            yield member.register_forward_hook(partial(self._leave_term, term))

    def _enter_child(self, module: nn.Module, args: tuple) -> None:
        self._active, self._inside, self.proved = False, 0, False
        if _FROM_START in module.__dict__:
            self._start(next(iter(self.terms)))
            for member, term in self.terms.values():
                _mark_parameters(member, term)

    def _enter_term(self, name: str, term: Term, member: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.proved:  # the trial
            return
        self._start(name)
        if any(kind(x) is Kind.PARTIAL for x in tensors((args, kwargs))):
            raise ValueError(self._message(f"{name.removeprefix(self.name + '.')} computes with it"))
        _mark_parameters(member, term)  # adapters read those of the layer around which they stand
        self._inside += term.known

    def _leave_term(self, term: Term, member: nn.Module, args: tuple, output: Any) -> None:
        if term.known and not self.proved:
            self._inside -= 1
            for value in list(tensors(output))[:1]:
                mark(value, Kind.PARTIAL)

    def _leave_child(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._active and output is None:  # it raised
            return
        if not self._active:  # a parent computes with parameters of a member that it does not call
            module.__dict__[_FROM_START] = True
            return
        self.end()
        outputs = output if isinstance(output, tuple | list) else (output,)
        if any(isinstance(x, Tensor) and kind(x) is None for x in (outputs if self._all_outputs else outputs[:1])):
            raise ValueError(self._message("what it returns is not made of it"))
        if not self._all_outputs and any(kind(x) is Kind.PARTIAL for x in outputs[1:]):
            raise ValueError(self._message("it returns more that is made of it, which is not summed"))
        self.proved = True

    def end(self) -> None:
        """Stop to follow what the child gives, where it never came to its end: a block calls members, or it raised."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def _start(self, term: str) -> None:
        if not self._active:
            self._term, self._active = term, True
            self.__enter__()

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._inside:
            return func(*args, **kwargs)
        try:
            found = kind_of_result(name, args, kwargs, self._is_zero)
        except NotASumError as problem:
            if isinstance(problem, NotLinearError) and not list(tensors(output := func(*args, **kwargs))):
                return output
            raise ValueError(self._message(f"{name.strip('_')} {problem}")) from None
        output = func(*args, **kwargs)
        for value in _written(name, args, output):
            mark(value, found)
        return output

    def _is_zero(self, value: Tensor) -> bool:
        fixed = not value.requires_grad and id(value) not in self._buffers and not isinstance(value, nn.Parameter)
        return fixed and not value.any()

    def _message(self, problem: str) -> str:
        return (
            f"{self.name} ({type(self.module).__name__}) is summed over the tp ranks as a whole, and what "
            f"{self._term.removeprefix(self.name + '.')} gives is a rank's term of that sum, but {problem}. Do that "
            f"outside of the module, where the sum is complete, or add the rule {wildcard(self.name)!r}: 'separate' to "
            "the tensor-parallel plan: each of its members then sums what it gives"
        )


def _column_wise(model: nn.Module, boundary: str, layout: Layout) -> Iterator[nn.Module]:
    for name, module in model.get_submodule(boundary).named_modules(prefix=boundary):
        placed = layout.parameters.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and placed is not None and placed.placement == Shard(0):
            yield module


def _mark_parameters(member: nn.Module, term: Term) -> None:
    for name, found in term.parameters.items():
        if (parameter := own_parameters(member)[name]) is not None:
            mark(parameter, found)


def _written(name: str, args: tuple, output: Any) -> list[Tensor]:
    """Yields what an operation returns, and what it writes to."""
    found = list(tensors(output))
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name[-1:] == "_" and name[:2] != "__"
    ):
        base = base_of(args[0])
        found += [args[0]] if base is None else [args[0], base]
    return found
