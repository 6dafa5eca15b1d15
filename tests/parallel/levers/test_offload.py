"""Parameters that wait on the host: same numbers, weights that are read there, and what moves to the device.

On CPU host and device are one; where things lie is checked with "meta" for a device, and in ``tests/gpu``.
"""

import atexit
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel._compat.dtensor.tensors import is_offloaded
from lightning_automodel._compat.lightning.modules import destroy_groups, destroy_groups_at_exit
from lightning_automodel.config import resolve_offload_policy
from lightning_automodel.loading.host_offload import BACKEND, move, offload_policy_for
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.training import Recorder, fit, tiny_llama

ON_HOST = {"offload_policy": True}
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_shard": 2}, {"activation_checkpointing": "full", "reshard_after_forward": True}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"dp_replicate": 2}, {"offload_policy": {"pin_memory": False}, "fsdp2_min_num_params": 10**9}),
]


def errors() -> list[tuple[float, str]]:
    """Runs on each rank."""
    found = []
    for sizes, fields in CASES:
        config = FSDP2Config(**{**ON_HOST, **fields})
        build = partial(tiny_model, "qwen3_5_text", num_hidden_layers=2)  # in two dtypes: two groups in a unit
        error, where = compare(build, sizes, 2, Schedule(steps=2, length=12), config).largest
        found.append((error, f"{where} with {sizes} {fields}"))
    return found


@pytest.mark.slow
def test_numbers_are_those_of_one_process(pool2: Pool) -> None:
    for found in pool2.run(errors):
        assert [where for error, where in found if error > 1e-5] == []


class Pretrained(Recorder):
    """Reads its weights from files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path).train()


def train(path: Path, directory: Path, fields: dict[str, Any], epochs: int = 2, **arguments: Any) -> dict[str, Tensor]:
    """Runs on each rank: clips, accumulates and saves."""
    module = Pretrained(path)
    sizes = {"tp": 2, "config": FSDP2Config(**fields)}
    _, parameters = fit(sizes, directory, epochs=epochs, module=module, **arguments)
    assert is_offloaded(module) == bool(fields)
    assert module.device == module.model.device == torch.device("cpu")
    return parameters


@pytest.mark.long
def test_training_and_resume(pool2: Pool, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    expected = pool2.run(train, tmp_path, tmp_path / "a", {}, trainer=True)[0]
    found = pool2.run(train, tmp_path, tmp_path / "b", ON_HOST, trainer=True)[0]
    resume = tmp_path / "b" / "epoch=0.ckpt"
    resumed = pool2.run(train, tmp_path, tmp_path / "c", ON_HOST, resume=resume, trainer=True)[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(resumed[name], value), name


def moved() -> dict[str, set[str]]:
    """Runs on each rank: where the parts of a model lie that moves to another device."""
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), tp=2), "cpu")
    found = {}
    for name, fields in (("offloaded", ON_HOST), ("not", {})):
        model = parallelize(tiny_model("llama"), mesh, FSDP2Config(**fields))
        move(model, torch.device("meta"))
        found[name] = {p.to_local().device.type for p in model.parameters() if isinstance(p, DTensor)}
        found[name] |= {f"{buffer.device.type} buffer" for buffer in model.buffers()}
    return found


def test_what_moves_to_the_device(pool2: Pool) -> None:
    expected = {"offloaded": {"cpu", "meta buffer"}, "not": {"meta", "meta buffer"}}
    assert pool2.run(moved) == [expected] * 2


def test_ways_to_say_it() -> None:
    assert resolve_offload_policy(True) == CPUOffloadPolicy()
    assert resolve_offload_policy({"pin_memory": False}) == CPUOffloadPolicy(pin_memory=False)
    assert resolve_offload_policy(CPUOffloadPolicy()) == CPUOffloadPolicy()
    for nothing in (None, False, OffloadPolicy()):
        assert resolve_offload_policy(nothing) is None
    with pytest.raises(ValueError, match="no field pin; its field is pin_memory"):
        FSDP2Config(offload_policy={"pin": True})
    with pytest.raises(ValueError, match="offload_policy='cpu' is no policy; use True"):
        FSDP2Config(offload_policy="cpu")  # type: ignore[arg-type]


def test_what_communicates_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = FSDP2TPStrategy(config=FSDP2Config(offload_policy=True))
    strategy.parallel_devices = [torch.device("cuda", 0)]
    strategy.cluster_environment = LightningEnvironment()
    assert strategy._get_process_group_backend() == BACKEND
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(
        ValueError, match=r"\(cuda:nccl\) cannot communicate; leave backend at None, or use \"cuda:nccl,"
    ):
        offload_policy_for(True, "cuda")


@pytest.mark.parametrize(("backend", "ends"), [("cpu:gloo", False), ("nccl", False), (BACKEND, True)])
def test_groups_end_with_the_process(backend: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning ends those of a backend that is called "nccl"."""
    registered: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend if ":" in backend else f"cuda:{backend}")
    monkeypatch.setattr(atexit, "register", registered.append)
    destroy_groups_at_exit()
    assert registered == [destroy_groups] * ends
