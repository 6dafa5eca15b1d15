"""The functional API on meshes with axes of a user's names, as a plain script makes them, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_automodel.mesh import AxisNames
from lightning_automodel.parallelizer import fsdp2_strategy_parallelize, parallelize
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE, build_llama
from tests.support.comparison import compare

EXACT = MixedPrecisionPolicy()
OWN_NAMES = {"dp_replicate_mesh_name": "replica", "dp_shard_cp_mesh_name": "shard", "tp_mesh_name": "model"}


def two_axes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_cp", "tp"))
    model = fsdp2_strategy_parallelize(model, own, EXACT)
    meshes = {id(p.device_mesh) for p in model.parameters() if isinstance(p, DTensor)}
    assert len(meshes) == 1, "FSDP2 makes one for each parameter, which took a quarter of the time to load a model"
    return model


def replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    own = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "shard", "model"))
    return fsdp2_strategy_parallelize(model, own, EXACT, **OWN_NAMES)


def named_axes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "model"))
    return parallelize(model, own, axis_names=AxisNames(dp_shard_cp="shard", tp="model"))


def four_axes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fsdp2_strategy_parallelize(model, mesh, EXACT, sequence_parallel=True, reshard_after_forward=False)


MAKERS = {"two axes": two_axes, "named": named_axes, "four axes": four_axes}


def errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    sharded = {"dp_shard": 2, "tp": 2}
    found = {
        name: compare(build_llama, sharded, 4, SCHEDULE, make_parallel=make).largest for name, make in MAKERS.items()
    }
    replicated = compare(build_llama, {"dp_replicate": 2, "tp": 2}, 4, SCHEDULE, make_parallel=replicas)
    return found | {"replicas": replicated.largest}


@pytest.mark.slow
def test_meshes_of_the_user(pool4: Pool) -> None:
    for found in pool4.run(errors):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def default_policy() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Runs on each rank: dtypes of a parameter, of the output and of a gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_shard_cp", "tp"))
    model = fsdp2_strategy_parallelize(build_llama(), mesh)
    logits = model(input_ids=torch.arange(6)[None]).logits
    logits.float().sum().backward()
    weight = model.get_parameter("lm_head.weight")
    assert isinstance(weight, DTensor)
    assert weight.grad is not None
    return weight.dtype, logits.dtype, weight.grad.dtype


def test_default_policy_computes_in_bfloat16(pool2: Pool) -> None:
    assert pool2.run(default_policy) == [(torch.float32, torch.bfloat16, torch.float32)] * 2


def mistakes() -> list[str]:
    """Runs on each rank: the messages."""
    found = []
    for shape, names in (((4,), ("tp",)), ((2, 2), ("data", "tp")), ((2, 1, 2), ("replica", "dp_shard_cp", "tp"))):
        with pytest.raises(ValueError, match="device mesh") as caught:
            fsdp2_strategy_parallelize(nn.Linear(2, 2), init_device_mesh("cpu", shape, mesh_dim_names=names))
        found.append(str(caught.value))
    return found


def test_an_axis_is_missing_or_left_out(pool4: Pool) -> None:
    missing, renamed, left_out = pool4.run(mistakes)[0]
    assert "none is called dp_shard_cp" in missing
    assert 'init_device_mesh("cuda", (1, 8)' in renamed
    assert "dp_replicate=1 x dp_shard_cp=1 x tp=2 make 2" in left_out
