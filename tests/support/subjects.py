"""A LightningModule that notes every number of a run, for any strategy, and what two runs must have in common.

A window of 8 rows is one optimizer step in every layout, and each micro-batch is one row, so that losses of a batch as
a whole (router balancing) are the same too::

    one process      row 0, row 1, ..., row 7     8 micro-batches
    two data ranks   row 0, row 2, ...            4 micro-batches
                     row 1, row 3, ...
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.distributed.uneven_shards import PARTITION, Fragment, as_stored
from lightning_automodel.finetuning import HuggingFaceExport

ROWS, WINDOW, UNEVEN, LENGTH, VOCABULARY = 16, 8, 5, 8, 61
SIZES: dict[str, Any] = dict(
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    use_cache=False,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 1.0},
}
OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


def save_families(directory: Path) -> Path:
    """Writes one tiny checkpoint per family."""
    for name, more in FAMILIES.items():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](**SIZES, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    return directory


class Subject(L.LightningModule):
    """Trains a checkpoint; its step returns a dict, and a metric is its last submodule."""

    def __init__(self, path: Path, optimizer: str = "sgd", frozen: bool = False, recomputed: bool = False) -> None:
        super().__init__()
        self.path, self.optimizer, self.frozen, self.recomputed = path, optimizer, frozen, recomputed
        self.model: Any = None
        self.mean = MeanMetric()
        self.notes: dict[str, list[Any]] = {"losses": [], "gradients": [], "rates": []}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path).train()
            if self.recomputed:
                self.model.gradient_checkpointing_enable()
            if self.frozen:
                self.model.model.layers[0].requires_grad_(False)
                self.model.get_input_embeddings().requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.notes["losses"].append(loss.item())
        return {"loss": loss, "rows": len(batch[0])}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes["gradients"].append(gradients_of(self))
        self.notes["rates"].append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss)
        self.log("mean", self.mean)
        self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> tuple[int, float]:
        return int(batch[0][0, 0]), self.loss(batch).item()

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](p for p in self.parameters() if p.requires_grad)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def gradients_of(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Whole copies on rank 0. Under Megatron-FSDP a rank whose shard is empty has no gradient, but takes part."""
    found = {}
    for name, p in module.named_parameters():
        partition = getattr(p, PARTITION, None)
        if partition is not None and p.requires_grad:
            source = p if p.grad is None else p.grad
            found[name] = gather_part(Fragment(source.detach().to_local(), partition))
        elif p.grad is not None:
            found[name] = gather_part(p.grad)
    return found


def gather_part(tensor: Tensor) -> Tensor | None:
    """A plain copy on rank 0."""
    if not torch.distributed.is_initialized():
        return tensor.detach().clone()
    whole = gather_on_rank_zero(as_stored(tensor))
    return None if whole is None else whole.clone()


def data(count: int) -> DataLoader:
    """Rows of token ids, one per batch; the first id is the row's number."""
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.arange(count)
    return DataLoader(TensorDataset(ids))


def run_everything(
    module: Subject,
    strategy: Strategy | str,
    devices: int,
    data_size: int,
    directory: Path,
    epochs: int = 2,
    resume: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fits with uneven validation, tests and predicts; leaves ``epoch=N.ckpt`` and ``export`` in ``directory``."""
    saver = ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    run = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[saver, HuggingFaceExport(str(directory / "export"))],
        max_epochs=epochs,
        **{
            **quiet,
            "accumulate_grad_batches": WINDOW // data_size,
            "gradient_clip_val": 0.5,
            "num_sanity_val_steps": 1,
            **settings,
        },
    )
    run.fit(module, data(ROWS), data(UNEVEN), ckpt_path=resume)
    validated = {name: float(value) for name, value in run.callback_metrics.items()}
    parameters = {name: gather_part(p) for name, p in module.named_parameters()}
    tested = run.test(module, data(UNEVEN), verbose=False)[0]
    predicted = run.predict(module, data(UNEVEN))
    assert predicted is not None
    return {
        **module.notes,
        "parameters": parameters,
        "validated": validated,
        "tested": tested,
        "predicted": dict(predicted),  # type: ignore[arg-type]
    }


def differences(one: dict[str, Any], ranks: list[dict[str, Any]], data_size: int) -> dict[str, float]:
    """The largest relative error of each kind of number; ``inf`` where something is missing."""
    first = ranks[0]
    copies = len(ranks) // data_size
    losses = [loss for step in zip(*(r["losses"] for r in ranks[::copies]), strict=True) for loss in step]
    found = {
        "losses": _furthest(losses, one["losses"]),
        "rates": _furthest(first["rates"], one["rates"]),
        "parameters": _furthest_tensor([first["parameters"]], [one["parameters"]]),
        "gradients": _furthest_tensor(first["gradients"], one["gradients"]),
    }
    for kind in ("validated", "tested"):
        for rank in ranks:
            assert rank[kind].keys() == one[kind].keys(), (kind, rank[kind], one[kind])
            error = _furthest(list(rank[kind].values()), list(one[kind].values()))
            found[kind] = max(found.get(kind, 0.0), error)
    predicted = {row: loss for rank in ranks for row, loss in rank["predicted"].items()}
    rows = sorted(one["predicted"])
    assert sorted(predicted) == rows
    found["predicted"] = _furthest([predicted[r] for r in rows], [one["predicted"][r] for r in rows])
    return found


def _furthest(actual: list[float], expected: list[float]) -> float:
    if len(actual) != len(expected):
        return float("inf")
    return max((abs(a - e) / max(abs(e), 1e-12) for a, e in zip(actual, expected, strict=True)), default=float("inf"))


def _furthest_tensor(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if a.keys() != e.keys():
            return float("inf")
        scale = torch.stack([value.norm() for value in e.values()]).norm().item()
        # A gradient that is zero by construction is noise on one process too.
        errors = [(a[k] - e[k]).norm().item() / max(e[k].norm().item(), 1e-4 * scale) for k in e]
        worst = max([worst, *errors])
    return worst
