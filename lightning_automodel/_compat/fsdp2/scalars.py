"""Private names of FSDP2 for parameters without dimensions: it shards rows, of which they have none.

FSDP2 is given a row for each rank, and each stores one: the number itself, which ``Replicate`` says afterwards. The
scalar 5 over dp_shard=4, with the gradients 1, 2, 3, 4::

                 GPU 0      GPU 1      GPU 2      GPU 3
    stored       5          5          5          5
    gathered     5 5 5 5    5 5 5 5    5 5 5 5    5 5 5 5    with all else; the first one computes
    gradient     1 1 1 1    2 2 2 2    3 3 3 3    4 4 4 4
                 2.5        2.5        2.5        2.5        reduce-scatter, with all else
                 2.5        2.5        2.5        2.5        GPU 0's: each rank has rounded in an order of its own
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from lightning_automodel._compat.fsdp2.units import parameter_groups, set_spec

Place = tuple[nn.Module, str]
"""a module, and the name of a parameter there"""


def rows_of_scalar(scalar: nn.Parameter, ranks: int) -> nn.Parameter:
    """Make what FSDP2 is given in the place of ``scalar``: a row [ranks], on tp as the scalar is."""
    local: Tensor = scalar._local_tensor if isinstance(scalar, DTensor) else scalar
    rows = local.detach().expand(ranks).clone()
    if isinstance(scalar, DTensor):
        rows = DTensor.from_local(rows, scalar.device_mesh, scalar.placements, run_check=False)
    new = nn.Parameter(rows, requires_grad=scalar.requires_grad)
    new.__dict__.update(scalar.__dict__)
    return new


def keep_scalars_whole(unit: nn.Module, places: Collection[Place]) -> None:
    """Make scalars again of what an FSDP2 unit was given for them at ``places``."""
    for group in parameter_groups(unit):
        rows = [h for h in group.fsdp_params if (h._module_info.module, h._module_info.param_name) in places]
        for held in rows:
            held.__class__ = _Scalar
            held.lose_dims()
        if rows:
            group.fsdp_params = [*rows, *(held for held in group.fsdp_params if held not in rows)]
            group._all_reduce_hook = _OneSum(rows)


class _Scalar(FSDPParam):
    """A parameter of an FSDP2 unit that each rank holds whole."""

    takes_part = False

    def lose_dims(self) -> None:
        """Be without dimensions wherever FSDP2 asks for a shape, but for what it sends."""
        none = torch.Size(())
        self._orig_size = self.sharded_size = self.sharded_post_forward_size = none
        self._contiguous_orig_stride = self.contiguous_sharded_stride = ()
        self.contiguous_sharded_post_forward_stride = ()
        meta = TensorMeta(none, (), self.sharded_param.dtype)
        mesh = self._sharding_spec.mesh
        set_spec(self, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))
        if self._unsharded_dtensor_spec is not None:
            self._unsharded_dtensor_spec = replace(self._unsharded_dtensor_spec, tensor_meta=meta)
        whole = nn.Parameter(
            self.to_sharded_dtensor(self._sharded_param_data.view(())), requires_grad=self.sharded_param.requires_grad
        )
        whole.__dict__.update(self.sharded_param.__dict__)
        self.sharded_param = whole
        self._setattr_on_modules(whole)

    def reset_sharded_param(self) -> None:
        """Take the parameter that the module has now."""
        self.sharded_param = getattr(self._module_info.module, self._module_info.param_name)
        whole: Any = self.sharded_param
        if whole._local_tensor.is_meta:
            return
        if self.pin_memory and not whole._local_tensor.is_pinned():
            whole._local_tensor = whole._local_tensor.cpu().pin_memory()
        self._sharded_param_data = whole._local_tensor.view(-1)
        set_spec(self, whole._spec)

    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> DTensor:
        """Describe what waits between the forward and the backward pass, in fewer ranks (``reshard_after_forward``)."""
        return self.to_sharded_dtensor(tensor)

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        self.takes_part = True
        return super()._get_grad_inner_tensor(grad).expand(self.mesh_info.shard_mesh_size)


class _OneSum:
    """Gives all ranks the sums of the first, behind FSDP2's reduction: the first elements of what a rank has of it."""

    def __init__(self, scalars: Iterable[_Scalar]) -> None:
        self.scalars = list(scalars)

    def __call__(self, reduced: Tensor) -> None:
        count = sum(scalar.takes_part for scalar in self.scalars)
        for scalar in self.scalars:
            scalar.takes_part = False
        group = self.scalars[0].mesh_info.shard_process_group
        if count and group.size() > 1:
            dist.broadcast(reduced[:count], group=group, group_src=0)
