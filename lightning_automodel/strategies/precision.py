"""Translates ``Trainer(precision=...)`` into dtypes of storage, compute and reduction, equal under all strategies."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_automodel.distributed.whole_numbers import whole_numbers
from lightning_automodel.gradients import clip_grad_norm_, to_local_if_dtensor
from lightning_automodel.strategies.steps.finite import FiniteGuard, can_defer
from lightning_automodel.strategies.steps.loss_scaling import AgreedGradScaler

PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]

_STORED = {"bf16-true": torch.bfloat16}
_OF_LIGHTNING = (MixedPrecision.__qualname__, FSDPPrecision.__qualname__)  # their entries in a checkpoint
_COMPUTED = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FSDP2Precision(Precision):
    """Precision of parameters and compute as FSDP2 means it. DDP follows (``parallel/precision/compute_dtype.py``).

    ============  ==================  =======================================
    precision     parameters stored   compute / reduction of gradients
    ============  ==================  =======================================
    32-true       float32             float32 / float32
    bf16-true     bfloat16            bfloat16 / float32
    bf16-mixed    float32             bfloat16 / float32
    16-mixed      float32             float16 / float32, with loss scaling
    ============  ==================  =======================================

    Parameters and floating-point inputs are cast; there is no autocast, and buffers keep their dtype.

    Args:
        precision: one of the names above.

    Raises:
        ValueError: for any other name.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(f"precision={precision!r} is not available under this strategy; {_way_out()}")
        self.precision = precision
        self.param_dtype = _STORED.get(precision, torch.float32)
        compute = _COMPUTED.get(precision)
        self.mp_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        self.scaler: AgreedGradScaler | None = None
        self.guard = FiniteGuard("ignore")
        self.clip_norm: Callable[[Iterable[Tensor], float], Tensor] = clip_grad_norm_
        self.around_forward: Callable[[], AbstractContextManager[None]] = nullcontext
        """Surrounds steps of training and evaluation."""
        self.around_backward: Callable[[], AbstractContextManager[None]] = nullcontext
        """Surrounds autograd's work alone; hooks before and behind it (``on_after_backward``) are outside."""
        self.around_hooks: Callable[[], AbstractContextManager[None]] = nullcontext
        """Surrounds hooks that look at gradients before a step."""
        self.norm: Tensor | None = None
        """Of the gradients that were clipped last, before that: on the device, nobody has waited for it."""

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Creates the loss scaler, on the device of the model; a later run keeps its state."""
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = AgreedGradScaler(next(model.parameters()).device.type)
        return model, optimizers, lr_schedulers

    # ---- a step ------------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        """Surrounds each step of training and evaluation, which Lightning calls a forward pass."""
        with super().forward_context(), self.around_forward():
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Scales the loss."""
        if self.scaler is None:
            self.guard.record(tensor)
        else:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the backward pass."""
        with self.around_backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward pass, hooks and clipping on true gradients, the step unless a gradient
        overflowed.
        """
        if self.scaler is None:
            return self._step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError("precision='16-mixed' scales the loss, which LBFGS cannot; use 'bf16-mixed' or '32-true'")
        result = closure()
        if result is None and model.automatic_optimization:  # training_step skipped the batch
            return result
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        return self.scaler.step(optimizer, **kwargs)

    def _step(
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the step of an optimizer unless losses or gradients are not finite; it may call ``closure`` itself."""
        defers = self.guard.policy != "ignore" and can_defer(optimizer)
        if self.guard.policy == "ignore" or (self.guard.policy == "error" and not defers):
            closure = self.guard.checked(closure, optimizer, model)
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError('nonfinite="skip" leaves steps out, but LBFGS asks for gradients within one; use "error"')
        result = closure()
        finding = self.guard.inspect(optimizer, model)
        if defers:
            self.guard.defer(finding, optimizer)
        elif not self.guard.allows(finding):
            return result
        try:
            self._after_closure(model, optimizer)
            stepped = optimizer.step(**kwargs)
        finally:
            vars(optimizer).pop("found_inf", None)
        return result if stepped is None else stepped

    @override
    def _after_closure(self, model: "pl.LightningModule", optimizer: Any) -> None:
        with whole_numbers(), self.around_hooks():
            super()._after_closure(model, optimizer)

    # ---- clipping ----------------------------------------------------------------------------------------------------

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips true gradients, also when called by hand before the step."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self.scaler is not None and clip_val > 0:
            self.scaler.unscale_(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips by the norm over all ranks and parameters."""
        self.norm = self.clip_norm(self.main_params(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips each element, on the rank that has it."""
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                to_local_if_dtensor(parameter.grad).clamp_(-clip_val, clip_val)

    # ---- state -------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale, equal on all ranks."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the loss scale of a checkpoint."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the loss scale under the name by which Lightning's own strategies find it."""
        if self.scaler is not None:
            checkpoint[_OF_LIGHTNING[0]] = self.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with the loss scale that a strategy of Lightning's own has saved; ours comes after it."""
        for name in _OF_LIGHTNING:
            if checkpoint.get(name):
                self.load_state_dict(checkpoint[name])

    def scale_since(self, checkpoint: Mapping[str, Any]) -> float:
        """Tell by what gradients in ``checkpoint`` are multiplied, so that those of this run's losses add to them: they
        are at the scale of the run that saved them. Behind :meth:`load_state_dict`.
        """
        saved = next((checkpoint[name]["scale"] for name in _OF_LIGHTNING if checkpoint.get(name)), 1.0)
        return self.state_dict().get("scale", 1.0) / saved

    def unscaled(self, optimizers: Iterable[Optimizer]) -> tuple[set[int], float]:
        """List the ids of parameters whose gradients wait for a step unscaled, and the scale that all others have."""
        if self.scaler is None:
            return set(), 1.0
        waiting = [each for each in optimizers if self.scaler.is_unscaled(each)]
        ids = {id(p) for each in waiting for group in each.param_groups for p in group["params"]}
        return ids, self.state_dict()["scale"]


def choose_precision(name: str, plugin: Precision | None) -> FSDP2Precision:
    """Chooses the plugin for ``Trainer(precision=name)`` or ``Trainer(plugins=plugin)``.

    Raises:
        ValueError: for a plugin that is not this strategy's, or a precision that it does not have.
    """
    return FSDP2Precision(name) if plugin is None else convert_precision(plugin)  # type: ignore[arg-type]


def convert_precision(plugin: Precision | None) -> FSDP2Precision:
    """Returns the plugin itself, if it is this strategy's; the default for ``None``.

    Raises:
        ValueError: for any other plugin.
    """
    if plugin is None:
        return FSDP2Precision()
    if not isinstance(plugin, FSDP2Precision):
        raise ValueError(
            f"the precision plugin {type(plugin).__name__} (precision={plugin.precision!r}) is not available under "
            f"this strategy, which casts parameters and inputs itself; {_way_out()}"
        )
    return plugin


def _way_out() -> str:
    names = ", ".join(repr(name) for name in get_args(PrecisionName))
    return f"use Trainer(precision=...) with one of {names}, or FSDP2Config(mp_policy=...) for other dtypes"
