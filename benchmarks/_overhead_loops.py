"""What is timed against the trainer: one Llama, one batch, and loops that step it, split by us or by others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks._by_torch import split_by_torch
from benchmarks._turns import Turns
from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes

VOCABULARY = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        tokens: of the one row of a batch.
        steps: that are timed.
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


# ---- loops -----------------------------------------------------------------------------------------------------------


def by_our_loop(size: Size, folder: str, turns: Turns) -> None:
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    loop(parallelize(make_model(size), mesh, FSDP2Config(enable_compile=size.compiled)), turns)


def by_torch_loop(size: Size, folder: str, turns: Turns) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    loop(split_by_torch(make_model(size), mesh["tp"], mesh["dp"], size.compiled), turns)


def by_transformers(size: Size, folder: str, turns: Turns) -> None:
    config = DistributedConfig(tp_size=2)
    # It asks for accelerate, and does not use it for one device per process.
    transformers.integrations.accelerate.is_accelerate_available = lambda: True
    loop(LlamaForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32), turns)


def by_nemo(size: Size, folder: str, turns: Turns) -> None:
    """NVIDIA's parallelizer. It pins other versions of transformers and megatron-fsdp: ``pip install --no-deps``."""
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize

    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    model = fsdp2_strategy_parallelize(
        make_model(size), mesh, mp_policy=MixedPrecisionPolicy(), enable_compile=size.compiled
    )
    loop(model, turns, gathered_loss)  # the model's own does not take the logits that it gives then


def gathered_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits.full_tensor()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def loop(model: Any, turns: Turns, loss_of: Callable[[Any, Tensor], Tensor] = own_loss) -> None:
    optimizer = make_optimizer(model.train())
    for ids in turns:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
