"""Reduction of gradients over replicas: when torch's wrapper does it, when the strategy does, and what users see of it.

::

    all parameters as when it was made, one backward pass     torch's wrapper, in buckets, beside the backward pass
    another choice of parameters between two steps             torch's wrapper, made anew
    a choice within the step, a second or a plain backward     averages behind the pass (gradients.py)
    hooks of users on parameters                               run behind the reduction (hooks.py)
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_automodel._compat.lightning.modules import check_all_reduced, register_comm_hook
from lightning_automodel._compat.lightning.strategies import expect_first_step
from lightning_automodel._compat.torch.modules import parameters_of
from lightning_automodel.config import DDPConfig
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.strategies.base import SharedHooks
from lightning_automodel.strategies.replicas.gradients import PlainBackward, average_gradients, reduce_in_float32
from lightning_automodel.strategies.replicas.hooks import HooksOfReplicas
from lightning_automodel.strategies.sharded_use import HELD
from lightning_automodel.strategies.steps.last_gradients import REDUCED_EACH_TIME

HOOKED_EACH_TIME = (
    "a parameter has a hook (register_post_accumulate_grad_hook), so gradients are reduced at every micro-batch"
)


class ReducedReplicas(SharedHooks, LightningDDPStrategy):
    """Lightning's strategy for replicas, with gradients of all ranks behind every backward pass.

    Attributes:
        config: the switches.
    """

    config: DDPConfig

    def __init__(self, **arguments: Any) -> None:
        self._averages_itself = self._has_averaged = self._is_stepping = self._has_failed = False
        self._holds = False
        self._plain: PlainBackward
        self._hooks: HooksOfReplicas | None = None
        super().__init__(**arguments)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if self._is_fitting:
            self.configure_ddp()  # after the weights of a checkpoint are in place, and the optimizer has its parameters
            self._reduced = self._trained()
            if isinstance(self._ddp_comm_state, PostLocalSGDState):
                self._enable_model_averaging()
            if self.data_size > 1:
                self._hooks = HooksOfReplicas(self._module, lambda: self._plain.is_known)
                is_held, then = lambda: self._is_stepping or not self._reduces, self._end_plain_backward
                self._plain = PlainBackward(self._module, is_held, then)
                self.precision_plugin.around_backward = self._around_backward

    @property
    def _reduces(self) -> bool:
        """Tell whether gradients are due behind a backward pass: not within ``block_backward_sync``."""
        return getattr(self.model, "require_backward_grad_sync", False)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._averages_itself = False
        if self._hooks is not None:
            self._begin_passes(self._hooks)
        # Behind a failed pass; a callback unfroze a layer, or another adapter is in use.
        if self._has_failed or self._trained().keys() != self._reduced.keys():
            self._wrap_again()
        handle = self._module.register_forward_hook(self._end_forward)
        self._is_stepping = self._module.automatic_optimization  # its gradients are reduced with those of its loss
        try:
            return super().training_step(*args, **kwargs)
        finally:
            handle.remove()
            self._is_stepping = False
            if self._averages_itself:
                self.model.require_backward_grad_sync = True  # type: ignore[union-attr]

    def _begin_passes(self, hooks: HooksOfReplicas) -> None:
        hooks.find()
        hooks.forget()
        self._plain.forget()

    def _wrap_again(self) -> None:
        trained = self._trained()
        average_gradients([p for i, p in self._reduced.items() if i not in trained])
        self.model = self.lightning_module
        self.configure_ddp()
        expect_first_step(self)
        self._reduced, self._has_failed = trained, False

    def _end_forward(self, *_: Any) -> None:
        """Keep torch's wrapper from reducing what it was made for, if the step itself has chosen other parameters."""
        if self._module.automatic_optimization and self._must_average():
            self._averages_itself = True
            self.model.require_backward_grad_sync = False  # type: ignore[union-attr]

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._module.automatic_optimization and self._must_average():
            self._averages_itself = True  # the wrapper is not prepared, and reduces nothing
        else:
            super().pre_backward(closure_loss)
        if self._hooks is not None:
            self._plain.expect(closure_loss)

    def _end_plain_backward(self) -> None:
        assert self._hooks is not None
        self._holds = False
        self._hooks.run_on_sums()

    @contextmanager
    def _around_backward(self) -> Generator[None, None, None]:
        """Surrounds autograd's work, behind which ``on_after_backward`` sees the gradients of all ranks."""
        assert self._hooks is not None
        self._hooks.find()
        try:
            with self._plain.known():
                yield
        except BaseException:  # torch's wrapper waits for the rest of this pass, and for nothing else
            self._has_failed = True
            raise
        if self._averages_itself:
            automatic, self._averages_itself = self._module.automatic_optimization, False
            average_gradients([p for p in self._module.parameters() if automatic or p.requires_grad])
            self._has_averaged = True
        self._hooks.run_on_gradients()
        if self._reduces:
            self._hooks.run_on_sums()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._has_averaged:
            self.note_backward()
        else:
            super().post_backward(closure_loss)
            if self._reduces:
                check_all_reduced(self.model)
        self._has_averaged = False
        self._holds = self._holds and not self._reduces

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._holds and not self._module.automatic_optimization:
            warn_once(f"{HELD}: replicas go apart, unless you average them yourself")
        return super().optimizer_step(*args, **kwargs)

    def _must_average(self) -> bool:
        """Tell whether gradients are due, and torch's wrapper would leave some on their rank, without a word."""
        trained = self._trained()
        if not self._reduces or trained.keys() == self._reduced.keys():
            return False
        are_found = self.config.find_unused_parameters and trained.keys() < self._reduced.keys()
        return self._module.automatic_optimization or not are_found  # by hand, no gradient waits for a later backward

    def _trained(self) -> dict[int, nn.Parameter]:
        """Collect what torch's wrapper reduces, which it decides on when it is made, by its ids."""
        return {id(parameter): parameter for parameter in parameters_of(self._module) if parameter.requires_grad}

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps the gradients of backward passes on their rank, within this context."""
        if self._reads_between or self._have_hooks_of_sums():
            warn_once(REDUCED_EACH_TIME if self._reads_between else HOOKED_EACH_TIME)
            yield
            return
        if not self.config.static_graph:
            self._holds = self.data_size > 1
            with super().block_backward_sync():
                yield
            return
        # Within no_sync torch crashes in the first step and stops reducing afterwards (pytorch 143580, 187732). Means
        # of gradients that are equal already stay what they are, so reducing each time is exact.
        warn_once("static_graph=True: gradients are reduced at every micro-batch, since torch cannot defer it then")
        yield

    def _have_hooks_of_sums(self) -> bool:
        if self._hooks is None:
            return False
        self._hooks.find()
        return self._hooks.read_sums

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning does so on CUDA only; gloo calls hooks too.
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:
            register_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
        elif any(p.requires_grad and p.dtype.itemsize < 4 for p in self.model.parameters()):
            self.model.register_comm_hook(None, reduce_in_float32)

    @override
    def on_exception(self, exception: BaseException) -> None:
        text = str(exception)
        super().on_exception(exception)
        if "Expected to have finished reduction in the prior iteration" in text:  # of which Lightning says less
            exception.args = (
                "training_step left parameters that require a gradient unused. If that is meant, freeze them "
                "(requires_grad_(False) in configure_model), or use DDPConfig(find_unused_parameters=True). "
                f"torch says: {text}",
            )

    @override
    def teardown(self) -> None:
        self.model = self.lightning_module  # without the wrapper
        if self._hooks is not None:
            self._plain.remove()
            self._hooks.remove()
        super().teardown()
