"""One GPU that several ranks share, each as a host of its own: NCCL between them, over sockets, against one process.

NCCL refuses two ranks on a device of one host, and takes for another host what ``NCCL_HOSTID`` says. Kernels of the
ranks run in turns, so that nothing is learnt here of time.
"""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy, MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_automodel.testing.pool import Pool
from tests.exactness.test_families import check, errors
from tests.gpu.test_smoke import SIZES, Finetune, batches, reference
from tests.support.comparison import Schedule
from tests.support.run_family import Run

SECONDS = 180
SCHEDULE = Schedule(steps=2, micro_batches=2, clip=0.5)
IN_SEQUENCE = FSDP2Config(sequence_parallel=True, activation_checkpointing=True)
COMPILED = FSDP2Config(sequence_parallel=True, enable_compile=True)
LAYOUTS: dict[str, tuple[dict[str, int], FSDP2Config]] = {
    "dp_shard=2": ({"dp_shard": 2}, FSDP2Config()),
    "tp=2": ({"tp": 2}, FSDP2Config()),
    "tp=2, sequence parallelism": ({"tp": 2}, IN_SEQUENCE),
    "tp=2, compiled": ({"tp": 2}, COMPILED),
    "cp=2": ({"cp": 2}, FSDP2Config()),
    "ep=2": ({"dp_shard": 2, "ep": 2}, FSDP2Config()),
    "dp_shard=2 x tp=2": ({"dp_shard": 2, "tp": 2}, IN_SEQUENCE),
    "cp=2 x tp=2": ({"cp": 2, "tp": 2}, FSDP2Config()),
}
FAMILIES = ("llama", "gemma3_text", "qwen3_moe")


def as_hosts() -> None:
    """Let this rank be the only one of its host, as NCCL sees it."""
    os.environ |= {
        "NCCL_HOSTID": f"host {os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
    }


def on_one_gpu(runs: dict[str, Run]) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    as_hosts()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    return errors(runs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient(layout: str, pool2: Pool, pool4: Pool) -> None:
    sizes, config = LAYOUTS[layout]
    families = FAMILIES[-1:] if "ep" in sizes else FAMILIES[:1] if config.enable_compile else FAMILIES
    runs = {f: Run(sizes=sizes, schedule=SCHEDULE, config=config, device="cuda") for f in families}
    pool = pool2 if runs[families[0]].world == 2 else pool4
    check(pool.run(on_one_gpu, runs, trainer=True, timeout=SECONDS))


STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {
    "fsdp2": (FSDP2TPStrategy, {}),
    "tp": (FSDP2TPStrategy, {"tp": 2}),
    "ddp": (DDPStrategy, {}),
    **{f"megatron{n}": (MegatronFSDPStrategy, {"config": MegatronFSDPConfig(zero_dp_strategy=n)}) for n in (1, 3)},
}


def train(path: Path, name: str) -> list[float]:
    """Runs on each rank: the losses of an epoch, and of another one that goes on from its checkpoint."""
    as_hosts()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    kind, options = STRATEGIES[name]
    found = []
    for epochs in (1, 2):
        module = Finetune(path / "model")
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            num_nodes=2,
            strategy=kind(**options),
            max_epochs=epochs,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            callbacks=ModelCheckpoint(path / name, "{epoch}", save_top_k=-1),
            enable_progress_bar=False,
            logger=False,
        )
        trainer.fit(
            module,
            DataLoader(batches(), batch_size=2 if options.get("tp") else 1),
            ckpt_path=path / name / "epoch=0.ckpt" if found else None,
        )
        found += module.losses
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_trainer(name: str, pool2: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    found = torch.tensor(pool2.run(train, tmp_path, name, trainer=True, timeout=SECONDS))
    expected = torch.tensor(reference(tmp_path / "model", epochs=2))
    torch.testing.assert_close(found.mean(0), expected, rtol=1e-5, atol=0)
