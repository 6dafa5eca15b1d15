"""One GPU, one rank: the other strategies give the numbers of plain PyTorch. Not run where there is no GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import DDPConfig, DDPStrategy, MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_automodel.parallelizer import megatron_fsdp_strategy_parallelize
from tests.gpu.test_smoke import SIZES, batches, fit, reference


def megatron(**fields: Any) -> Callable[[], Strategy]:
    return lambda: MegatronFSDPStrategy(config=MegatronFSDPConfig(**fields))


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp-checkpointing": lambda: DDPStrategy(DDPConfig(activation_checkpointing="full")),
    **{f"megatron{stage}": megatron(zero_dp_strategy=stage) for stage in range(4)},
    "megatron-checkpointing": megatron(activation_checkpointing="full"),
    "megatron-double-buffer": megatron(fsdp_double_buffer=True),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_on_one_gpu(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    expected = torch.tensor(reference(tmp_path / "model"))
    exact = torch.tensor(fit(tmp_path / "model", tmp_path, "32-true", STRATEGIES[name]()))
    mixed = torch.tensor(fit(tmp_path / "model", tmp_path, "bf16-mixed", STRATEGIES[name]()))
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_a_plain_loop(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).cuda().train()
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = megatron_fsdp_strategy_parallelize(model, mesh, optimizer, zero_dp_strategy=stage)
        other = torch.optim.SGD(expected.parameters(), lr=0.1)
        for batch in batches():
            ids = batch[None].cuda()
            losses = [m(input_ids=ids, labels=ids).loss for m in (model, expected)]
            for loss, stepping in zip(losses, (optimizer, other), strict=True):
                loss.backward()
                stepping.step()
                stepping.zero_grad()
            torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    finally:
        dist.destroy_process_group()
