"""The strategies that make models parallel, by the name of the model's class: the default one, and users' own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from typing_extensions import override

from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP, find_axes
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import prompt_encoders, within_adapters
from lightning_automodel.parallel.adapters import install_peft_models
from lightning_automodel.parallel.guards.prompts import refuse_prompts
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallel.setup import FSDP2Setup
from lightning_automodel.plans.selection import Rules


class ParallelizationStrategy(ABC):
    """How models of one class are made parallel. Register a subclass with :func:`register_parallel_strategy`."""

    @abstractmethod
    def parallelize(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: CPUOffloadPolicy | dict[str, Any] | bool | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool | str = False,
        tp_shard_plan: Rules | str | None = None,
        dp_replicate_mesh_name: str = DP_REPLICATE,
        dp_shard_cp_mesh_name: str = DP_SHARD_CP,
        tp_mesh_name: str = TP,
        **kwargs: Any,
    ) -> nn.Module:
        """Makes ``model`` parallel and returns it.

        Args:
            model: perhaps on the meta device.
            device_mesh: with the axes that the three names say.
            mp_policy: dtypes of compute and reduction.
            offload_policy: as in :class:`~lightning_automodel.FSDP2Config`, and so the next two.
            sequence_parallel: cut the residual stream over tp.
            activation_checkpointing: recompute activations.
            tp_shard_plan: ``FSDP2Config.tp_plan``.
            dp_replicate_mesh_name: axis over which shards are replicated; the mesh may lack it.
            dp_shard_cp_mesh_name: axis over which parameters are sharded.
            tp_mesh_name: axis over which matrices are split.
            kwargs: the other fields of :class:`~lightning_automodel.FSDP2Config`, and ``param_dtype``, the dtype in
                which parameters are stored; and ``fully_shard_fn``, called in place of FSDP2's ``fully_shard`` for each
                unit and the model.
        """


class DefaultParallelizationStrategy(ParallelizationStrategy):
    """What every model gets: its plan, then FSDP2 over its blocks. Subclasses may change arguments, or the model."""

    @override
    def parallelize(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: CPUOffloadPolicy | dict[str, Any] | bool | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool | str = False,
        tp_shard_plan: Rules | str | None = None,
        dp_replicate_mesh_name: str = DP_REPLICATE,
        dp_shard_cp_mesh_name: str = DP_SHARD_CP,
        tp_mesh_name: str = TP,
        **kwargs: Any,
    ) -> nn.Module:
        setup = FSDP2Setup.from_keywords(
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            sequence_parallel=sequence_parallel,
            activation_checkpointing=activation_checkpointing,
            tp_shard_plan=tp_shard_plan,
            dp_replicate_mesh_name=dp_replicate_mesh_name,
            dp_shard_cp_mesh_name=dp_shard_cp_mesh_name,
            tp_mesh_name=tp_mesh_name,
            **kwargs,
        )
        return setup.apply(model, device_mesh)


class CheckpointingParallelizationStrategy(DefaultParallelizationStrategy):
    """The default strategy, with activation checkpointing where the caller says nothing of it."""

    @override
    def parallelize(self, model: nn.Module, device_mesh: DeviceMesh, *args: Any, **kwargs: Any) -> nn.Module:
        if len(args) < 4:  # the fourth is activation_checkpointing
            kwargs.setdefault("activation_checkpointing", True)
        return super().parallelize(model, device_mesh, *args, **kwargs)


PARALLELIZATION_STRATEGIES: dict[str, ParallelizationStrategy] = {
    # What these classes need beyond the default is data: their plans (plans/additions.py), the parameters that they
    # keep in float32 and the dtypes of their layers (fsdp2.py makes one group of each).
    **{
        name: DefaultParallelizationStrategy()
        for name in (
            "NemotronHForCausalLM",
            "DeepseekV4ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "WanTransformer3DModel",
        )
    },
    "HunyuanVideo15Transformer3DModel": CheckpointingParallelizationStrategy(),
    "LTX2VideoTransformer3DModel": CheckpointingParallelizationStrategy(),
}
_DEFAULT = DefaultParallelizationStrategy()


def get_parallelization_strategy(model: nn.Module) -> ParallelizationStrategy:
    """Finds the strategy registered for the class of ``model`` or for a base class of it, else the default one."""
    found = (PARALLELIZATION_STRATEGIES.get(name) for name in class_names(model))
    return next((strategy for strategy in found if strategy is not None), _DEFAULT)


def register_parallel_strategy(arg: Any = None, *, name: str | None = None) -> Any:
    """Registers a :class:`ParallelizationStrategy` for the models of one class, under Lightning too. A decorator::

        @register_parallel_strategy(name="MyModelForCausalLM")
        class MyStrategy(DefaultParallelizationStrategy): ...

    Args:
        arg: the strategy: a class that is built without arguments, or an instance; ``None`` in the form above.
        name: name of the model's class; ``None``: that of the strategy's class.

    Returns:
        ``arg``, or a decorator that returns what it is given.

    Raises:
        ValueError: if ``arg`` is no strategy.
    """
    return _register(name) if arg is None else _register(name)(arg)


def run_strategy(model: nn.Module, mesh: DeviceMesh, setup: FSDP2Setup) -> nn.Module:
    """Make ``model`` parallel as the strategy that is registered for its class does it, or for what peft has wrapped.

    Only a strategy that a user wrote sees the setup as keyword arguments.

    Raises:
        ValueError: if the strategy returns something else than the model.
    """
    install_peft_models(model)
    _shard_prompts(model, mesh, setup)
    inner = within_adapters(model)
    strategy = get_parallelization_strategy(inner)
    if type(strategy) is DefaultParallelizationStrategy:
        setup.apply(inner, mesh)
        return model
    found = strategy.parallelize(inner, mesh, **setup.to_keywords())
    if found is not inner:
        raise ValueError(
            f"{type(strategy).__name__}.parallelize returned {_short(found)} for a {class_names(inner)[0]}; it must "
            "change the model in place and return it, as super().parallelize(...) does"
        )
    return model


def _shard_prompts(model: nn.Module, mesh: DeviceMesh, setup: FSDP2Setup) -> None:
    """Make encoders of prompts parallel beside the model that they are for, each as a layer of its own."""
    if encoders := prompt_encoders(model):
        tp = find_axes(mesh, setup.axis_names).tp.size()
        refuse_prompts(model, tp)
        for encoder in encoders:
            replace(setup, config=config_for(encoder, setup.config, tp)).apply(encoder, mesh)


def _short(value: Any) -> str:
    return "None" if value is None else f"another {type(value).__name__}"


def _register(name: str | None) -> Callable[[Any], Any]:
    def register(arg: Any) -> Any:
        if isinstance(arg, str):
            raise ValueError(
                f"register_parallel_strategy({arg!r}): the name of a model's class is given as name={arg!r}, before "
                "the strategy: @register_parallel_strategy(name=...)"
            )
        strategy = arg() if isinstance(arg, type) and issubclass(arg, ParallelizationStrategy) else arg
        if not isinstance(strategy, ParallelizationStrategy):
            raise ValueError(f"{arg!r} is not a ParallelizationStrategy; derive it from that class")
        PARALLELIZATION_STRATEGIES[name or type(strategy).__name__] = strategy
        return arg

    return register
