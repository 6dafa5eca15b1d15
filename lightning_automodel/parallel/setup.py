"""Everything that FSDP2 with tensor parallelism is told: one object, on its one road from a caller to the stages.

Users' own strategies are called with it as the keyword arguments that other tools have; this is where they are made,
and where they become an object again.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel._compat.torch.modules import hooks_after_accumulation_kept
from lightning_automodel.config import FSDP2Config, resolve_mp_policy
from lightning_automodel.mesh import AxisNames, find_axes
from lightning_automodel.parallel.fsdp2.shard_unit import FullyShard
from lightning_automodel.parallel.fsdp2.sharding import FSDP2Sharding
from lightning_automodel.parallel.guards.hooks_of_users import refuse_gradient_hooks
from lightning_automodel.parallel.guards.own_memory import give_own_memory
from lightning_automodel.parallel.stages import apply_stages

MP_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""What ``mp_policy=None`` means without a trainer: compute in bfloat16, reduce in float32."""


@dataclass(frozen=True, kw_only=True)
class FSDP2Setup:
    """What a model is made parallel with.

    Attributes:
        config: the switches; its ``mp_policy`` was resolved into the one here.
        mp_policy: dtypes of compute and reduction.
        param_dtype: in which parameters are stored; ``None``: as the model has them.
        axis_names: of the mesh.
        fully_shard_fn: called in place of FSDP2's ``fully_shard``.
    """

    config: FSDP2Config
    mp_policy: MixedPrecisionPolicy = MP_POLICY
    param_dtype: torch.dtype | None = None
    axis_names: AxisNames = field(default_factory=AxisNames)
    fully_shard_fn: FullyShard | None = None

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Run the stages on ``model``, in place, and return it."""
        refuse_gradient_hooks(model)
        give_own_memory(model)
        axes = find_axes(mesh, self.axis_names)
        sharding = FSDP2Sharding(self.config, self.mp_policy, axes, self.fully_shard_fn)
        with hooks_after_accumulation_kept(model):
            return apply_stages(model, axes, self.config, sharding, self.param_dtype)

    def to_keywords(self) -> dict[str, Any]:
        """Spell the setup as keyword arguments of :meth:`ParallelizationStrategy.parallelize`."""
        switches = self.config.to_dict()
        return {
            "tp_shard_plan": switches.pop("tp_plan"),
            "dp_replicate_mesh_name": self.axis_names.dp_replicate,
            "dp_shard_cp_mesh_name": self.axis_names.dp_shard_cp,
            "tp_mesh_name": self.axis_names.tp,
            "param_dtype": self.param_dtype,
            **switches,
            "mp_policy": self.mp_policy,
            **({} if self.fully_shard_fn is None else {"fully_shard_fn": self.fully_shard_fn}),
        }

    @classmethod
    def from_keywords(
        cls,
        *,
        mp_policy: MixedPrecisionPolicy | dict[str, Any] | None,
        tp_shard_plan: Any,
        dp_replicate_mesh_name: str,
        dp_shard_cp_mesh_name: str,
        tp_mesh_name: str,
        param_dtype: torch.dtype | None = None,
        fully_shard_fn: FullyShard | None = None,
        **switches: Any,
    ) -> "FSDP2Setup":
        """Read the arguments of :meth:`ParallelizationStrategy.parallelize`; ``switches`` are fields of the config."""
        names = AxisNames(dp_replicate=dp_replicate_mesh_name, dp_shard_cp=dp_shard_cp_mesh_name, tp=tp_mesh_name)
        return cls(
            config=FSDP2Config(tp_plan=tp_shard_plan, **switches),
            mp_policy=resolve_mp_policy(mp_policy) or MP_POLICY,
            param_dtype=param_dtype,
            axis_names=names,
            fully_shard_fn=fully_shard_fn,
        )
