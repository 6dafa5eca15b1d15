"""What is timed against the trainer: one Llama, one batch, and loops that step it, split by us or by others."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks._by_torch import split_by_torch
from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes

WARM = 3
VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        tokens: of the one row of a batch.
        steps: of a run.
        compiled: blocks go through ``torch.compile``.
    """

    hidden: int
    layers: int
    tokens: int
    steps: int
    compiled: bool = False


def make_model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch(size: Size) -> Tensor:
    return torch.randint(VOCABULARY, (1, size.tokens), generator=torch.Generator().manual_seed(1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)  # the plans of others mix meshes


# ---- loops, each returns seconds per step ----------------------------------------------------------------------------


def by_our_loop(size: Size, folder: str) -> float:
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    return loop(parallelize(make_model(size), mesh, FSDP2Config(enable_compile=size.compiled)), size)


def by_torch_loop(size: Size, folder: str) -> float:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return loop(split_by_torch(make_model(size), mesh["tp"], mesh["dp"], size.compiled), size)


def by_transformers(size: Size, folder: str) -> float:
    config = DistributedConfig(tp_size=2)
    # It asks for accelerate, and does not use it for one device per process.
    transformers.integrations.accelerate.is_accelerate_available = lambda: True
    return loop(LlamaForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32), size)


def by_nemo(size: Size, folder: str) -> float:
    """NVIDIA's parallelizer. It pins other versions of transformers and megatron-fsdp: ``pip install --no-deps``."""
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize

    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    model = fsdp2_strategy_parallelize(
        make_model(size), mesh, mp_policy=MixedPrecisionPolicy(), enable_compile=size.compiled
    )
    return loop(model, size, gathered_loss)  # the model's own does not take the logits that it gives then


def gathered_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits.full_tensor()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def loop(model: Any, size: Size, loss_of: Callable[[Any, Tensor], Tensor] = own_loss) -> float:
    optimizer, ids = make_optimizer(model.train()), make_batch(size)
    times = []
    for _ in range(size.steps + 1):
        times.append(time.perf_counter())
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return per_step(times)


def per_step(times: list[float]) -> float:
    steps = [after - before for before, after in pairwise(times)]
    return median(steps[WARM:])
