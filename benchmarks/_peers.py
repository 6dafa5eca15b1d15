"""One fine-tuning run by one library, from files to a checkpoint: what ``benchmarks.peers`` runs on each rank.

``torchrun --nproc-per-node 2 -m benchmarks._peers WAY CASE MODEL STARTED``: rank 0 prints one line of JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

from benchmarks._by_torch import clip, optimizer_of, shard_by_hand
from benchmarks._measure import print_result, status

RANKS, ROWS, LENGTH, STEPS, WARM = 2, 2, 256, 6, 2
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens, the same for everybody."""

    def __init__(self, vocabulary: int) -> None:
        self.ids = torch.randint(vocabulary, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def read(folder: str, case: str, **options: Any) -> Any:
    """The model from its files, with adapters where the case is LoRA."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False, **options)
    return adapted(model) if case == "lora" else model


def adapted(model: Any) -> Any:
    """Add adapters of peft to a model."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**LORA))


def rows_of_a_rank(case: str) -> int:
    """Ranks that split layers see all rows."""
    return ROWS if case == "tp" else ROWS // RANKS


def loss_of_the_model(model: Any, ids: Tensor) -> Tensor:
    """The loss that transformers' models compute."""
    return model(input_ids=ids, labels=ids).loss


def loop(
    model: Any, times: list[float], case: str, loss_of: Callable[[Any, Tensor], Tensor] = loss_of_the_model
) -> "Save":
    """Train by hand, on this rank's share of the rows, and save by torch's distributed checkpoint."""
    rank, ranks = (0, 1) if case == "tp" else (dist.get_rank(), RANKS)
    ids = Rows(model.config.vocab_size).ids.view(STEPS, ROWS, LENGTH)[:, rank::ranks]
    optimizer = optimizer_of(model.train())
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in ids:
        loss_of(model, batch).backward()
        clip(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    return partial(save_by_torch, model, optimizer)


def save_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """As torch's recipe of its distributed checkpoint does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)


# ---- ways: each trains, and returns how it saves weights and moments -------------------------------------------------

Save = Callable[[Path], Any]


def by_lightning(strategy: Any, folder: str, case: str, times: list[float], shard: Any = None) -> Save:
    """Lightning's Trainer with a strategy; ``shard`` is what its user does by hand."""
    from benchmarks._peers_lightning import Module, fit

    module = Module(partial(read, folder, case), shard, times)
    return fit(module, strategy, Rows(vocabulary(folder)), rows_of_a_rank(case), gradient_clip_val=1.0).save_checkpoint


def ours(folder: str, case: str, times: list[float]) -> Save:
    """This project's default strategy."""
    from lightning_automodel import FSDP2TPStrategy

    return by_lightning(FSDP2TPStrategy(tp=RANKS if case == "tp" else 1), folder, case, times)


def ours_ddp(folder: str, case: str, times: list[float]) -> Save:
    """This project's DDP."""
    from lightning_automodel import DDPStrategy

    return by_lightning(DDPStrategy(), folder, case, times)


def lightning_ddp(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's DDP."""
    return by_lightning("ddp", folder, case, times)


def lightning_fsdp(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's FSDPStrategy, a unit per block."""
    from lightning.pytorch.strategies import FSDPStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return by_lightning(FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}), folder, case, times)


def lightning_model_parallel(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's ModelParallelStrategy, with what its user writes: a plan, and wrapping."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    tp = RANKS if case == "tp" else 1
    strategy = ModelParallelStrategy(data_parallel_size=RANKS // tp, tensor_parallel_size=tp)
    return by_lightning(strategy, folder, case, times, _shard_over_the_mesh)


def _shard_over_the_mesh(model: Any, mesh: Any) -> None:
    shard_by_hand(model, mesh["tensor_parallel"], mesh["data_parallel"])


def torch_loop(folder: str, case: str, times: list[float]) -> Save:
    """A loop on torch alone: its styles, fully_shard, its distributed checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh

    tp = RANKS if case == "tp" else 1
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    return loop(shard_by_hand(read(folder, case), mesh["tp"], mesh["dp"]), times, case)


def _split_by_transformers(folder: str, case: str) -> Any:
    from transformers.distributed import DistributedConfig

    size = {"tp_size": RANKS} if case == "tp" else {"fsdp_size": RANKS}
    return read(folder, case, distributed_config=DistributedConfig(**size))


def transformers_loop(folder: str, case: str, times: list[float]) -> Save:
    """A loop on the model that transformers splits while it reads: FSDP2, or tensor parallelism."""
    return loop(_split_by_transformers(folder, case), times, case)


def transformers_trainer(folder: str, case: str, times: list[float]) -> Save:
    """transformers' Trainer, which runs DDP."""
    return _by_transformers(read(folder, case), folder, case, times)


def transformers_split_trainer(folder: str, case: str, times: list[float]) -> Save:
    """transformers' Trainer on the model that transformers splits while it reads."""
    return _by_transformers(_split_by_transformers(folder, case), folder, case, times)


def _by_transformers(model: Any, folder: str, case: str, times: list[float]) -> Save:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=rows_of_a_rank(case),
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(vocabulary(folder)), callbacks=[Clock()])
    trainer.train()

    def save(path: Path) -> None:
        arguments.output_dir = str(path)
        trainer._save_checkpoint(model, None)  # as `save_strategy="steps"`: the public save_model has no moments

    return save


def accelerate_ddp(folder: str, case: str, times: list[float]) -> Save:
    """Accelerate, which runs DDP."""
    from accelerate import Accelerator

    return _accelerated(Accelerator(cpu=True), read(folder, case), folder, times)


def accelerate_fsdp2(folder: str, case: str, times: list[float]) -> Save:
    """Accelerate with its FSDP2 plugin."""
    from benchmarks._by_accelerate import splitting_accelerator

    return _accelerated(splitting_accelerator(1), read(folder, case), folder, times)


def accelerate_tp(folder: str, case: str, times: list[float]) -> Save:
    """Accelerate with tensor parallelism, for which transformers splits the model."""
    from benchmarks._by_accelerate import splitting_accelerator

    return _accelerated(splitting_accelerator(RANKS), _split_by_transformers(folder, case), folder, times)


def _accelerated(accelerator: Any, model: Any, folder: str, times: list[float]) -> Save:
    loader = DataLoader(Rows(vocabulary(folder)), batch_size=ROWS // RANKS)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer_of(model), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    return lambda path: accelerator.save_state(str(path))


def nemo(folder: str, case: str, times: list[float]) -> Save:
    """NVIDIA's parallelizer in a loop, with its adapters and its loss; its own ``from_pretrained`` asks for CUDA."""
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn.functional import pad

    tp = RANKS if case == "tp" else 1
    mesh = init_device_mesh("cpu", (1, RANKS // tp, tp), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    model = read(folder, "full")
    if case == "lora":
        from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

        adapters = PeftConfig(match_all_linear=True, dim=LORA["r"], alpha=LORA["lora_alpha"])
        apply_lora_to_linear_modules(model, adapters)
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())
    loss = MaskedCrossEntropy(reduction="mean")

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        return loss(model(input_ids=ids).logits, pad(ids, (0, 1), value=-100)[:, 1:].contiguous())

    return loop(model, times, case, loss_of)


NEMO = "nemo-automodel in a loop"
WAYS: dict[str, Callable[[str, str, list[float]], Save]] = {
    "Trainer + FSDP2TPStrategy": ours,
    "Trainer + our DDPStrategy": ours_ddp,
    "torch in a loop (styles, fully_shard)": torch_loop,
    "Trainer + ModelParallelStrategy": lightning_model_parallel,
    "Trainer + FSDPStrategy": lightning_fsdp,
    "Trainer + Lightning's DDP": lightning_ddp,
    "transformers' Trainer": transformers_trainer,
    "transformers' Trainer, DistributedConfig": transformers_split_trainer,
    "transformers' DistributedConfig in a loop": transformers_loop,
    "accelerate, DDP": accelerate_ddp,
    "accelerate, FSDP2": accelerate_fsdp2,
    "accelerate, TP": accelerate_tp,
    NEMO: nemo,
}
WITHOUT_TP = (
    "Trainer + our DDPStrategy",
    "Trainer + FSDPStrategy",
    "Trainer + Lightning's DDP",
    "transformers' Trainer",
    "accelerate, DDP",
    "accelerate, FSDP2",
)


def ways_for(case: str) -> list[str]:
    """Name the ways that have something of the kind."""
    return [way for way in WAYS if (way not in WITHOUT_TP if case == "tp" else way != "accelerate, TP")]


def vocabulary(folder: str) -> int:
    """Read the number of tokens that the model embeds."""
    return json.loads((Path(folder) / "config.json").read_text())["vocab_size"]


def measure(way: str, case: str, folder: str) -> dict[str, Any]:
    """Run one way on this rank: when the first step was done, the seconds of a step and of a save, bytes."""
    times: list[float] = []
    dist.init_process_group("gloo")
    save = WAYS[way](folder, case, times)
    steps = [after - before for before, after in pairwise(times)]
    peak = status("VmHWM")
    with tempfile.TemporaryDirectory() as root:
        path = Path(sorted(_everybodys(root))[0]) / "saved"
        before = time.time()
        save(path)
        dist.barrier()
        seconds = time.time() - before
        written = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
        dist.barrier()
    return {"first": times[0], "steps": steps[WARM - 1 :], "save": seconds, "written": written, "peak": peak}


def _everybodys(value: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main(way: str, case: str, folder: str) -> None:
    """Entry point of torchrun."""
    print_result(partial(measure, way, case, folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
