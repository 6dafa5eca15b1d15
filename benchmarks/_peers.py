"""One fine-tuning run by one library, from files to a checkpoint: what ``benchmarks.peers`` starts on each rank.

``torchrun --nproc-per-node 2 -m benchmarks._peers WAY CASE MODEL STARTED``: rank 0 prints one line of JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM

RANKS, ROWS, LENGTH, STEPS, WARM = 2, 2, 256, 13, 3
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


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on what trains, fused, as transformers' Trainer has it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)


def loop(model: Any, times: list[float], rows: int, case: str, backward: Callable[[Tensor], None]) -> None:
    """Train by hand, on this rank's share of the rows."""
    rank, ranks = (dist.get_rank(), RANKS) if rows < ROWS else (0, 1)
    ids = Rows(model.config.vocab_size).ids.view(STEPS, ROWS, LENGTH)[:, rank::ranks]
    optimizer = optimizer_of(model.train())
    for batch in ids:
        backward(model(input_ids=batch, labels=batch).loss)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())


# ---- ways: each trains, and returns how it saves ---------------------------------------------------------------------

Save = Callable[[Path], Any]


def by_lightning(strategy: Any, folder: str, case: str, times: list[float], shard: Any = None) -> Save:
    """Lightning's Trainer with a strategy; ``shard`` is what its user does by hand."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = read(folder, case).train()
                if shard is not None:
                    shard(self.model, self.device_mesh)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def on_train_batch_end(self, *_: Any) -> None:
            times.append(time.time())

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **quiet
    )
    module = Module()
    per_rank = ROWS if case == "tp" else ROWS // RANKS
    trainer.fit(module, DataLoader(Rows(vocabulary(folder)), batch_size=per_rank))
    return trainer.save_checkpoint


def ours(folder: str, case: str, times: list[float]) -> Save:
    """This project's default strategy."""
    from lightning_automodel import FSDP2TPStrategy

    return by_lightning(FSDP2TPStrategy(tp=RANKS if case == "tp" else 1), folder, case, times)


def ours_ddp(folder: str, case: str, times: list[float]) -> Save:
    """This project's DDP."""
    from lightning_automodel import DDPStrategy

    return by_lightning(DDPStrategy(), folder, _not_tp(case), times)


def lightning_ddp(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's DDP."""
    return by_lightning("ddp", folder, _not_tp(case), times)


def lightning_fsdp(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's FSDPStrategy, a unit per block."""
    from lightning.pytorch.strategies import FSDPStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return by_lightning(FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}), folder, _not_tp(case), times)


def lightning_model_parallel(folder: str, case: str, times: list[float]) -> Save:
    """Lightning's ModelParallelStrategy, with what its user writes: a plan, and wrapping."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    tp = RANKS if case == "tp" else 1

    def shard(model: Any, mesh: Any) -> None:
        by_hand(model, mesh["tensor_parallel"], mesh["data_parallel"])

    strategy = ModelParallelStrategy(data_parallel_size=RANKS // tp, tensor_parallel_size=tp)
    return by_lightning(strategy, folder, case, times, shard)


def torch_loop(folder: str, case: str, times: list[float]) -> Save:
    """A loop on torch alone: its styles, fully_shard, its distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    tp = RANKS if case == "tp" else 1
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp", "tp"))
    model = by_hand(read(folder, case), mesh["tp"], mesh["dp"])
    loop(model, times, ROWS * tp // RANKS, case, lambda loss: loss.backward())
    return lambda path: dcp.save(get_model_state_dict(model), checkpoint_id=path)


def by_hand(model: Any, tp: Any, dp: Any) -> Any:
    """As torch's tutorials do."""
    from torch.distributed.fsdp import fully_shard

    from benchmarks._by_torch import split_by_torch

    if tp.size() > 1:
        return split_by_torch(model, tp, dp, False)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)


def transformers_trainer(folder: str, case: str, times: list[float]) -> Save:
    """transformers' Trainer, which runs DDP; with tp the model is split by its DistributedConfig."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    split = {"distributed_config": DistributedConfig(tp_size=RANKS)} if case == "tp" else {}
    model = read(folder, case, **split)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS if case == "tp" else ROWS // RANKS,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(vocabulary(folder)), callbacks=[Clock()])
    trainer.train()
    return lambda path: trainer.save_model(str(path))


def accelerate_ddp(folder: str, case: str, times: list[float]) -> Save:
    """Accelerate, which runs DDP."""
    from accelerate import Accelerator

    _not_tp(case)
    return _accelerated(Accelerator(cpu=True), folder, case, times)


def accelerate_fsdp2(folder: str, case: str, times: list[float]) -> Save:
    """Accelerate with its FSDP2 plugin."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    _not_tp(case)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type != DistributedType.FSDP:
        raise NotImplementedError(f"takes the plugin and runs {accelerator.distributed_type} on CPU, without a word")
    return _accelerated(accelerator, folder, case, times)


def _accelerated(accelerator: Any, folder: str, case: str, times: list[float]) -> Save:
    model = read(folder, case).train()
    loader = DataLoader(Rows(vocabulary(folder)), batch_size=ROWS // RANKS)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    return lambda path: accelerator.save_state(str(path))


def nemo(folder: str, case: str, times: list[float]) -> Save:
    """NVIDIA's parallelizer in a loop."""
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    tp = RANKS if case == "tp" else 1
    mesh = init_device_mesh("cpu", (1, RANKS // tp, tp), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
    model = fsdp2_strategy_parallelize(read(folder, case), mesh, mp_policy=MixedPrecisionPolicy())
    loop(model, times, ROWS * tp // RANKS, case, lambda loss: loss.backward())
    return lambda path: None


def _not_tp(case: str) -> str:
    if case == "tp":
        raise NotImplementedError("no tensor parallelism")
    return case


WAYS: dict[str, Callable[[str, str, list[float]], Save]] = {
    "Trainer + FSDP2TPStrategy": ours,
    "Trainer + our DDPStrategy": ours_ddp,
    "torch in a loop (styles, fully_shard)": torch_loop,
    "Trainer + ModelParallelStrategy": lightning_model_parallel,
    "Trainer + FSDPStrategy": lightning_fsdp,
    "Trainer + Lightning's DDP": lightning_ddp,
    "transformers' Trainer": transformers_trainer,
    "accelerate, DDP": accelerate_ddp,
    "accelerate, FSDP2": accelerate_fsdp2,
    "nemo-automodel in a loop": nemo,
}


def vocabulary(folder: str) -> int:
    """Read the number of tokens that the model embeds."""
    return json.loads((Path(folder) / "config.json").read_text())["vocab_size"]


def main(way: str, case: str, folder: str, started: str) -> None:
    """Run one way, and print when the first step was done, a step's time and the save's."""
    times: list[float] = []
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    try:
        save = WAYS[way](folder, case, times)
        steps = [after - before for before, after in pairwise(times)]
        result = {"first": times[0] - float(started), "step": median(steps[WARM:])}
        with tempfile.TemporaryDirectory() as root:
            before = time.time()
            save(Path(sorted(_everybodys(root))[0]) / "saved")
            dist.barrier()
            result["save"] = time.time() - before
    except Exception as error:  # what a peer cannot do is what the table shows
        result["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if int(os.environ["RANK"]) == 0:
        print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # a peer that failed may leave threads that wait


def _everybodys(value: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
