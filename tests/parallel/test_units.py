"""FSDP2 units one by one: the members of lists, units gathered for many forward passes, dtypes of their parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_automodel.config import FSDP2Config
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.mesh import DP_SHARD_CP, axis
from lightning_automodel.modules.structure import find_blocks, find_large_ends, find_towers
from lightning_automodel.parallel.fsdp2.units import differentiate_stream, group_blocks
from lightning_automodel.parallel.precision.autocast import widen_stream
from lightning_automodel.parallelizer import (
    DefaultParallelizationStrategy,
    apply_fsdp2_sharding_recursively,
    parallelize,
    unshard_fsdp2_model,
)
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE, build_llama
from tests.support.comparison import compare
from tests.support.families import tiny_model

EXACT = MixedPrecisionPolicy()


def shard_lists(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    data = axis(mesh, DP_SHARD_CP)
    apply_fsdp2_sharding_recursively(model, data)
    assert all(isinstance(layer, FSDPModule) for layer in model.get_submodule("model.layers"))
    assert not isinstance(model, FSDPModule)
    fully_shard(model, mesh=data)
    return model


def list_error() -> tuple[float, str]:
    """Runs on each rank."""
    return compare(build_llama, {"dp_shard": 2}, 2, SCHEDULE, make_parallel=shard_lists).largest


def test_members_of_lists_are_sharded(pool2: Pool) -> None:
    for error, where in pool2.run(list_error):
        assert error <= BOUND, where


def shard_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    sharded: list[nn.Module] = []

    def shard(module: nn.Module, **arguments: Any) -> nn.Module:
        sharded.append(module)
        return fully_shard(module, **arguments)

    DefaultParallelizationStrategy().parallelize(model, mesh, EXACT, fully_shard_fn=shard)
    assert sharded == [*model.get_submodule("model.layers").children(), model]
    return model


def error_by_hand(sizes: dict[str, int]) -> tuple[float, str]:
    """Runs on each rank."""
    return compare(build_llama, sizes, 2, SCHEDULE, make_parallel=shard_by_hand).largest


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}])
def test_the_default_strategy_shards_by_the_given_function(pool2: Pool, sizes: dict[str, int]) -> None:
    for error, where in pool2.run(error_by_hand, sizes):
        assert error <= BOUND, where


def test_blocks_in_a_dict_are_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(index): nn.Linear(2, 2) for index in range(3)})
    model.heads = nn.ModuleDict({"policy": nn.Linear(2, 2), "value": nn.Sequential(nn.Linear(2, 1))})
    assert list(find_blocks(model)) == ["layers.0", "layers.1", "layers.2"]


class Staged(nn.Module):
    """A list of layers for each stage, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + layer(x).tanh()
        return x


class PastHooks(Staged):
    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + layer.forward(x).tanh()
        return x


class WithLoss(nn.Module):
    def __init__(self, stages: nn.Module) -> None:
        super().__init__()
        self.embedding, self.stages = nn.Embedding(128, 4), stages

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.stages(self.embedding(input_ids)) @ self.embedding.weight.T
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def error_of_stages(kind: type[Staged]) -> tuple[float, str]:
    """Runs on each rank."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return WithLoss(kind())

    return compare(build, {"dp_shard": 2}, 2, SCHEDULE).largest


def test_blocks_are_what_is_called(pool2: Pool) -> None:
    """In lists within lists, and not where their owner goes past the hooks of a module."""
    assert list(find_blocks(Staged())) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert list(find_blocks(PastHooks())) == []
    for kind in (Staged, PastHooks):
        for error, where in pool2.run(error_of_stages, kind):
            assert error <= BOUND, where


def test_nested_lists_and_the_last_member() -> None:
    def layer() -> nn.Module:
        return nn.Linear(2, 2)

    inner = nn.ModuleDict({"a": layer(), "b": nn.Sequential(nn.ModuleList([layer()]))})
    model = nn.Sequential(nn.ModuleList([layer(), nn.ModuleList([layer(), layer()]), inner]), layer())
    calls: list[tuple[nn.Module, Any]] = []

    def record(module: nn.Module, *, mesh: Any, mp_policy: Any, reshard_after_forward: Any, **_: Any) -> None:
        calls.append((module, reshard_after_forward))

    mesh: Any = SimpleNamespace(device_type="cpu")
    apply_fsdp2_sharding_recursively(model, mesh, EXACT, fully_shard_fn=record)
    first, pair = model[0][0], model[0][1]
    expected = [(first, True), (pair[0], True), (pair[1], False), (inner["a"], True), (inner["b"], False)]
    assert calls == expected
    calls.clear()
    apply_fsdp2_sharding_recursively(model, mesh, EXACT, reshard_after_forward=2, fully_shard_fn=record)
    assert [after for _, after in calls] == [2] * 5


def test_small_blocks_share_units() -> None:
    def layers(*widths: int) -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(width, 1, bias=False) for width in widths])

    model = nn.ModuleDict({"encoder": layers(4, 4, 4, 20, 4), "decoder": layers(4, 4), "head": layers(20, 1)})
    blocks = {f"{name}.{i}": layer for name, members in model.items() for i, layer in enumerate(members)}

    def units(minimum: int | None) -> list[str]:
        grouped = group_blocks(model, blocks, minimum)
        assert [name for unit in grouped for name in unit] == list(blocks)
        return [" ".join(name.rpartition(".")[2] for name in unit) for unit in grouped]

    assert units(None) == units(1) == ["0", "1", "2", "3", "4", "0", "1", "0", "1"]
    assert units(8) == ["0 1", "2 3 4", "0 1", "0 1"]
    assert units(9) == ["0 1 2", "3 4", "0 1", "0 1"]
    assert units(10**9) == ["0 1 2 3 4", "0 1", "0 1"]


def test_minimum_of_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="fsdp2_min_num_params=0 must be at least 1 of parameters; None turns it off"):
        FSDP2Config(fsdp2_min_num_params=0)
    with pytest.raises(ValueError, match="groups repeated blocks, and Linear has none that FSDP2 gathers alone"):
        group_blocks(nn.Linear(2, 2), {}, 8)


# ---- gathered for many forward passes --------------------------------------------------------------------------------


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of what this rank holds."""
    return {name: tuple(to_local_if_dtensor(parameter).shape) for name, parameter in model.named_parameters()}


def unsharded_passes() -> dict[str, Any]:
    """Runs on each rank."""
    whole, ids = build_llama(), torch.arange(3, 23)[None]
    expected = whole(ids).logits
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_cp", "tp"))
    model = parallelize(build_llama(), mesh)
    sharded = shapes(model)
    with torch.no_grad(), unshard_fsdp2_model(model):
        gathered = shapes(model)
        logits = [model(ids).logits for _ in range(2)]
        kept = shapes(model) == gathered
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    return {
        "error": max((value - expected).abs().max().item() for value in logits),
        "kept": kept and gathered != sharded,
        "generated": torch.equal(tokens, whole.generate(ids, max_new_tokens=4, do_sample=False)),
        "sharded again": shapes(model) == sharded,
        "error after": (model(ids).logits - expected).abs().max().item(),
    }


def test_units_stay_gathered(pool4: Pool) -> None:
    for found in pool4.run(unsharded_passes):
        assert max(found.pop("error"), found.pop("error after")) < 1e-5
        assert found == {"kept": True, "generated": True, "sharded again": True}


def trains_after_unshard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize(model, mesh)
    with torch.no_grad(), unshard_fsdp2_model(model):
        model(torch.arange(3, 23)[None])
    return model


def unshard_error() -> tuple[float, str]:
    """Runs on each rank."""
    return compare(build_llama, {"dp_shard": 2}, 2, SCHEDULE, make_parallel=trains_after_unshard).largest


def test_training_after_the_context_is_exact(pool2: Pool) -> None:
    for error, where in pool2.run(unshard_error):
        assert error <= BOUND, where


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def dtypes_in_use() -> dict[str, set[torch.dtype]]:
    """Runs on each rank: dtypes that a layer with parameters of two dtypes sees, and those of its gradients."""
    model = tiny_model("qwen3_5_text", num_hidden_layers=2).to(torch.bfloat16)
    narrow = [m for m in model.modules() if hasattr(m, "A_log")]
    for module in narrow:
        module.A_log.data = module.A_log.data.float()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard_cp", "tp"))
    parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen: dict[str, set[torch.dtype]] = {"A_log": set(), "dt_bias": set()}
    for module in narrow:
        module.register_forward_pre_hook(lambda m, _: seen["A_log"].add(m.A_log.dtype))
        module.register_forward_pre_hook(lambda m, _: seen["dt_bias"].add(m.dt_bias.dtype))
    ids = torch.arange(3, 23)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    seen["gradient"] = {module.A_log.grad.dtype for module in narrow}
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return seen


def test_float32_beside_bfloat16_is_never_cast(pool2: Pool) -> None:
    for seen in pool2.run(dtypes_in_use):
        assert seen == {"A_log": {torch.float32}, "dt_bias": {torch.bfloat16}, "gradient": {torch.float32}}


# ---- models that do not say what their embedding is ------------------------------------------------------------------


def test_without_a_named_embedding() -> None:
    model = tiny_model("pp_formulanet")
    assert find_large_ends(model) == ({}, {})
    with pytest.raises(ValueError, match="PPFormulaNetForConditionalGeneration names none"):
        widen_stream(model, torch.float32)


def test_the_stream_is_differentiated_where_something_outside_of_blocks_trains() -> None:
    """As things are in each forward pass: callbacks freeze and unfreeze in the middle of a run."""
    model = tiny_model("llava").requires_grad_(False)
    towers = find_towers(model)
    embedding, block = model.get_input_embeddings(), list(find_blocks(model).values())[-1]
    differentiate_stream(model, towers)
    ids = torch.arange(3, 9).unsqueeze(0)
    for trains, expected in ((block, False), *((tower, True) for tower in towers.values()), (model.lm_head, True)):
        trains.requires_grad_(True)
        assert embedding(ids).requires_grad == expected
        trains.requires_grad_(False)
    assert not embedding(ids).requires_grad
    model.lm_head.requires_grad_(True)
    with torch.no_grad():
        assert not embedding(ids).requires_grad
