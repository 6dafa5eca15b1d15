"""Ways to read a model's files into two ranks, by this project and by others: what ``benchmarks.load`` runs.

``torchrun --nproc-per-node 2 -m benchmarks._peer_loads WAY TP MODEL`` measures one in any environment.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._by_torch import shard_by_hand
from benchmarks._measure import Memory, print_result
from benchmarks._model_on_disk import VALUE

RANKS = 2


def ours(folder: str, tp: int) -> nn.Module:
    """This project's strategy, around what its user writes."""
    from lightning_automodel import FSDP2TPStrategy

    return _under_lightning(FSDP2TPStrategy(tp=tp), folder, None)


def lightning_model_parallel(folder: str, tp: int) -> nn.Module:
    """Lightning's ModelParallelStrategy: its user reads, then shards."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=RANKS // tp, tensor_parallel_size=tp)
    return _under_lightning(strategy, folder, _shard_over_the_mesh)


def _shard_over_the_mesh(model: Any, mesh: DeviceMesh) -> None:
    shard_by_hand(model, mesh["tensor_parallel"], mesh["data_parallel"])


def _under_lightning(strategy: Any, folder: str, shard: Any) -> nn.Module:
    from benchmarks._peers_lightning import Module, fit

    module = Module(lambda: AutoModelForCausalLM.from_pretrained(folder), shard, [])
    fit(module, strategy, [0], 1, limit_train_batches=0, precision="bf16-true")  # that of the files
    return module.model


def transformers_split(folder: str, tp: int) -> nn.Module:
    """transformers splits while it reads."""
    from transformers.distributed import DistributedConfig

    size = {"tp_size": RANKS} if tp > 1 else {"fsdp_size": RANKS}
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**size))


def every_rank_reads(folder: str, tp: int) -> nn.Module:
    """Torch by hand: every rank reads all, then keeps its part."""
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    return shard_by_hand(AutoModelForCausalLM.from_pretrained(folder), mesh["tp"], mesh["dp"])


def rank_0_sends(folder: str, tp: int) -> nn.Module:
    """Torch by hand, as its FSDP2 tutorial does: rank 0 reads, and sends the others their parts."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    shard_by_hand(model, mesh["tp"], mesh["dp"]).to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def accelerate_ddp(folder: str, tp: int) -> nn.Module:
    """Accelerate on CPU: DDP, all weights on every rank."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(folder))


def accelerate_split(folder: str, tp: int) -> nn.Module:
    """Accelerate with the plugin for FSDP2, or with tensor parallelism."""
    from benchmarks._by_accelerate import splitting_accelerator

    accelerator = splitting_accelerator(tp)
    return accelerator.prepare(
        transformers_split(folder, tp) if tp > 1 else AutoModelForCausalLM.from_pretrained(folder)
    )


def nemo(folder: str, tp: int) -> nn.Module:
    """NVIDIA's from_pretrained."""
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    setup = DistributedSetup.build("fsdp2", ParallelismSizes(tp_size=tp))
    return NeMoAutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup)


OURS, NEMO = "Trainer + FSDP2TPStrategy", "nemo-automodel's from_pretrained"
DDP, SPLIT = "accelerate, DDP", "accelerate, FSDP2 or TP"
WAYS: dict[str, Callable[[str, int], nn.Module]] = {
    OURS: ours,
    "transformers' DistributedConfig": transformers_split,
    "Trainer + ModelParallelStrategy": lightning_model_parallel,
    "torch: every rank reads, then shards": every_rank_reads,
    "torch: rank 0 reads and broadcasts": rank_0_sends,
    DDP: accelerate_ddp,
    SPLIT: accelerate_split,
    NEMO: nemo,
}


def measure(way: str, tp: int, folder: str) -> dict[str, float]:
    """Read on this rank: seconds, and bytes above what the process held before.

    Raises:
        RuntimeError: where a weight does not have its value.
    """
    dist.init_process_group("gloo")
    dist.barrier()
    with Memory().measured() as memory:
        model = WAYS[way](folder, tp)
        parts = [getattr(parameter, "_local_tensor", parameter).data for parameter in model.parameters()]
        for part in parts:
            part.add_(0)  # until it is written to, a tensor on the CPU may be a view of the file
        dist.barrier()
    value = torch.tensor(VALUE, dtype=torch.bfloat16)
    if not all(bool((part == value.to(part.dtype)).all()) for part in parts):
        raise RuntimeError("a weight does not have its value")
    share = sum(part.nbytes for part in parts)
    return {"seconds": memory.seconds, "own": memory.own, "resident": memory.resident, "share": share}


def worst_of_ranks(way: str, tp: int, folder: str) -> dict[str, Any]:
    """Measure on all ranks; each figure is the largest."""
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, measure(way, tp, folder))
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def main(way: str, tp: str, folder: str) -> None:
    """Entry point of torchrun."""
    print_result(partial(worst_of_ranks, way, int(tp), folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
