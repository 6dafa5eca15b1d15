"""Names, parameters, their order and their defaults: those that users of other parallelizers know."""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel import FSDP2TPStrategy, parallelizer
from lightning_automodel.parallel import megatron_fsdp
from lightning_automodel.parallel.setup import FSDP2Setup
from tests.plans.support import build_llama

ALL = inspect.Parameter.empty
MEGATRON = {
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
}
STRATEGY = {
    "model": ALL,
    "device_mesh": ALL,
    "mp_policy": None,
    "offload_policy": None,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "tp_shard_plan": None,
    "dp_replicate_mesh_name": "dp_replicate",
    "dp_shard_cp_mesh_name": "dp_shard_cp",
    "tp_mesh_name": "tp",
}
PREFETCH = {"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": 2, "fsdp2_forward_prefetch_depth": 1}
SIGNATURES = {
    "fsdp2_strategy_parallelize": STRATEGY
    | {"enable_async_tensor_parallel": False, "enable_compile": False}
    | PREFETCH
    | {"reshard_after_forward": None},
    "megatron_fsdp_strategy_parallelize": {
        "model": ALL,
        "device_mesh": ALL,
        "optimizer": None,
        "megatron_fsdp_unit_modules": None,
        "tp_shard_plan": None,
        "zero_dp_strategy": 3,
        "init_fsdp_with_meta_device": False,
        **MEGATRON,
        "keep_fp8_transpose_cache": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
    },
    "nvfsdp_strategy_parallelize": {
        "model": ALL,
        "device_mesh": ALL,
        "optimizer": None,
        "nvfsdp_unit_modules": None,
        "tp_shard_plan": None,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "init_nvfsdp_with_meta_device": False,
        **MEGATRON,
        "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
        "dp_mesh_name": "dp",
        "cp_mesh_name": "cp",
        "tp_mesh_name": "tp",
    },
    "apply_fsdp2_sharding_recursively": {"module": ALL, "mesh": ALL, "mp_policy": None, "offload_policy": None}
    | PREFETCH
    | {"reshard_after_forward": None, "fully_shard_fn": None},
    "get_hf_tp_shard_plan": {"model": ALL},
    "get_hf_tp_plan": {"model": ALL},
    "translate_to_torch_parallel_style": {"style": ALL},
    "translate_parallel_style": {"style": ALL},
    "validate_tp_mesh": {"model": ALL, "tp_mesh": ALL},
    "validate_tp_mesh_for_nemotron_nas": {"model": ALL, "tp_size": ALL},
    "get_lm_ac_layers": {"model": ALL},
    "apply_selective_activation_checkpointing": {"model": ALL, "enable_compile": False},
    "ParallelizationStrategy.parallelize": {"self": ALL} | STRATEGY | {"kwargs": ALL},
    "get_parallelization_strategy": {"model": ALL},
    "register_parallel_strategy": {"arg": None, "name": None},
    "unshard_fsdp2_model": {"model": ALL},
    "import_class_from_path": {"name": ALL},
    "import_classes_from_paths": {"paths": ALL},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function: Callable = parallelizer
    for part in name.split("."):
        function = getattr(function, part)
    found = {parameter.name: parameter.default for parameter in inspect.signature(function).parameters.values()}
    assert list(found.items()) == list(SIGNATURES[name].items())


@pytest.mark.parametrize("name", ["HunyuanVideo15Transformer3DModel", "LTX2VideoTransformer3DModel"])
def test_video_transformers_are_checkpointed_unless_told_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(
        FSDP2Setup, "apply", lambda self, model, mesh: found.append(self.config.activation_checkpointing)
    )
    strategy, mesh = parallelizer.PARALLELIZATION_STRATEGIES[name], None
    strategy.parallelize(build_llama(), mesh)  # type: ignore[arg-type]
    strategy.parallelize(build_llama(), mesh, activation_checkpointing=False)  # type: ignore[arg-type]
    assert found == [True, False]


def test_a_pipeline_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"FSDP2TPStrategy\(pp=2\): there is no pipeline parallelism; use tp"):
        FSDP2TPStrategy(pp=2)


def test_every_name_is_exported() -> None:
    expected = {name.split(".")[0] for name in SIGNATURES}
    expected |= {"HAVE_MEGATRON_FSDP", "HAVE_NVFSDP", "PARALLELIZATION_STRATEGIES", "DefaultParallelizationStrategy"}
    assert expected <= set(parallelizer.__all__)
    assert all(hasattr(parallelizer, name) for name in parallelizer.__all__)


def test_megatron_names_what_is_there_instead() -> None:
    mesh: DeviceMesh = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="fsdp2_strategy_parallelize"):
        parallelizer.megatron_fsdp_strategy_parallelize(torch.nn.Linear(2, 2), mesh)
    with pytest.warns(DeprecationWarning, match="megatron_fsdp"), pytest.raises(ValueError, match="FSDP2"):
        parallelizer.nvfsdp_strategy_parallelize(torch.nn.Linear(2, 2), mesh)
    with (
        pytest.warns(DeprecationWarning, match="megatron"),
        pytest.raises(ValueError, match="no_shard, optim"),
    ):
        parallelizer.nvfsdp_strategy_parallelize(torch.nn.Linear(2, 2), mesh, data_parallel_sharding_strategy="all")


def test_the_old_spelling_of_megatron_hands_everything_on() -> None:
    old = {name: name for name in SIGNATURES["nvfsdp_strategy_parallelize"]}
    new = megatron_fsdp._new_spelling({**old, "data_parallel_sharding_strategy": "optim_grads"})
    expected = dict(SIGNATURES["megatron_fsdp_strategy_parallelize"])
    assert set(new) == set(expected)
    assert new.pop("zero_dp_strategy") == 2
    assert list(new.values()) == [
        name for name in old if name not in ("data_parallel_sharding_strategy", "cp_mesh_name")
    ]


@pytest.mark.parametrize("name", ["megatron_fsdp_strategy_parallelize", "nvfsdp_strategy_parallelize"])
@pytest.mark.filterwarnings("ignore:nvfsdp")
def test_what_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fsdp, "HAVE_MEGATRON_FSDP", False)
    with pytest.raises(ValueError, match=re.escape("pip install 'lightning_automodel[megatron]'")):
        getattr(parallelizer, name)(torch.nn.Linear(2, 2), None)


@pytest.mark.parametrize("switch", [{"enable_async_tensor_parallel": True}, {"offload_policy": {"pin": True}}])
def test_switches_that_are_refused(switch: dict) -> None:
    mesh: DeviceMesh = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=next(iter(switch))):
        parallelizer.fsdp2_strategy_parallelize(build_llama(), mesh, **switch)
