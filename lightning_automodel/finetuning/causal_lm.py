"""The module: a causal language model trained with a loss that is weighed by tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from lightning_automodel.checkpointing.without_trainer import let_lightning_read_folders
from lightning_automodel.finetuning.adapters import (
    add_adapter,
    check_adapter,
    freeze,
    refuse_saved_prompt,
    report_trainable,
)
from lightning_automodel.finetuning.pretrained import (
    TOKENIZER,
    Pretrained,
    find_config,
    looked_up,
    read_config,
    taken_arguments,
    with_quantization,
)
from lightning_automodel.finetuning.rows import IGNORED
from lightning_automodel.finetuning.schedule import WarmupCosine
from lightning_automodel.finetuning.token_loss import TokenLoss, TokenPerplexity, TokenWindow, count_causal_targets
from lightning_automodel.finetuning.tokenizers import check_vocabulary
from lightning_automodel.gradients import scale_
from lightning_automodel.metrics import expert_loads

Batch = dict[str, Tensor]  # each [batch, seq]


class CausalLM(L.LightningModule):
    """Fine-tunes any Hugging Face causal language model; logs what a run is judged by.

    The loss of an optimizer step is the mean over all its target tokens: of every micro-batch, of every data rank, of a
    last window with fewer micro-batches too. Logged: ``train/loss`` (that mean), ``train/tokens`` (targets so far),
    ``lr``; ``val/loss``, ``val/perplexity``, and the same under ``test``, exact
    over the whole data set. Losses that a model adds of its own (router balancing) keep their weight only where each
    micro-batch has as many targets as tokens.

    Args:
        model: name on the hub, or directory with config and weights; or directory of an adapter that was trained on
            such a model, as an export holds it, which is added to it, and trains on.
        optimizer: from parameters to an optimizer; on the command line a class path and its arguments.
        lr_scheduler: from the optimizer to a schedule, stepped once per optimizer step; ``None``: constant.
        model_kwargs: more arguments of ``from_pretrained``: ``attn_implementation``, ``trust_remote_code``, ``dtype``
            (by default what the trainer's precision asks for), fields of the config...
        from_scratch: random weights from the config; the directory then needs none.
        peft: an adapter: a config of peft (``LoraConfig(...)``), or its fields, as in YAML: ``{r: 8, target_modules:
            all-linear}``; or directory, or name on the hub, of one that trains on. The base is frozen. Whatever the
            names of a model's layers: "all-linear".
        freeze: patterns of names of parameters or modules that do not train: ``model.layers.[0-9].*``.
        saves_base: checkpoints hold the frozen base beside an adapter, too; it is read from ``model`` otherwise.

    Raises:
        ValueError: if ``model`` is a directory that does not exist or holds no weights, or an adapter beside ``peft``;
            from ``setup``: if it is no causal language model, or embeds fewer tokens than the data hold.
    """

    auto_class: Any = AutoModelForCausalLM
    tokenizer_file = TOKENIZER
    known_configs: Any = MODEL_FOR_CAUSAL_LM_MAPPING

    def __init__(
        self,
        model: str,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(
            parameters, lr=2e-5, weight_decay=0.0, fused=True
        ),
        lr_scheduler: LRSchedulerCallable | None = WarmupCosine,
        model_kwargs: dict[str, Any] | None = None,
        from_scratch: bool = False,
        peft: dict[str, Any] | Any | None = None,
        freeze: list[str] | None = None,
        saves_base: bool = False,
    ) -> None:
        super().__init__()
        found = Pretrained.of(model)
        found.check(from_scratch=from_scratch)
        peft = found.added(peft)
        self._source = found
        self.model_name, self.tokenizer_name = found.model, found.holder_of(self.tokenizer_file)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.model_kwargs = model_kwargs or {}
        self.from_scratch = from_scratch
        if peft is not None:
            check_adapter(peft)  # a mistake in it is said before anything is started
        self.peft, self.freeze_patterns, self.saves_base = peft, freeze or [], saves_base
        self.model: Any = None
        self.metrics = torch.nn.ModuleDict(
            {
                split: torch.nn.ModuleDict({"loss": TokenLoss(), "perplexity": TokenPerplexity()})
                for split in ("val", "test")
            }
        )
        self._window = TokenWindow()
        self._window_state: dict[str, Any] = {}
        self._closed: tuple[Tensor, Tensor] | None = None  # the sums of the step whose gradients wait
        self._tokens_seen = torch.zeros((), dtype=torch.float64)  # moves to the device with the first step

    def setup(self, stage: str) -> None:
        """Checks, before weights are read, that the model is a causal one, can train, and embeds all tokens."""
        if stage == TrainerFn.FITTING and self.peft is not None:
            refuse_saved_prompt(self.peft)
        if self.model is None:
            source = replace(self._source, model=self.model_name)
            config = read_config(source, self.model_kwargs, self.auto_class, self.known_configs)
            check_vocabulary(config, getattr(self.trainer, "datamodule", None))

    def configure_model(self) -> None:
        """Builds the model, once, where and how the strategy wants it."""
        if self.model is not None:
            return
        # Without a dtype transformers keeps that of the files; the default dtype is what the precision plugin asks for.
        kwargs = {"dtype": torch.get_default_dtype(), **self.model_kwargs}
        with taken_arguments(self.model_name, kwargs):
            if self.from_scratch:
                config, beside = find_config(self.model_name, kwargs)
                self.model = self.auto_class.from_config(config, **beside)
            else:
                with looked_up(self.model_name):
                    self.model = self.auto_class.from_pretrained(self.model_name, **with_quantization(kwargs))
        if self.peft is not None:
            self.model = add_adapter(self.model, self.peft)
        freeze(self.model, self.freeze_patterns)
        if self._trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            report_trainable(self.model, f"CausalLM(peft={self.peft}, freeze={self.freeze_patterns})")
        # from_pretrained returns a model in evaluation mode, and the trainer keeps the mode that it finds.
        self.model.train()

    def configure_optimizers(self) -> Any:
        """Builds the optimizer over what requires a gradient, and the schedule per optimizer step."""
        optimizer = self.optimizer(p for p in self.parameters() if p.requires_grad)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}}

    # ---- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Tells the schedule how long the run is."""
        # Not in configure_optimizers: the estimate sets the data loader up, before a resume could restore its state.
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            if isinstance(scheduler, WarmupCosine) and scheduler.total_steps is None:
                scheduler.set_total_steps(self.trainer.estimated_stepping_batches)
        micro_batches = self.trainer.accumulate_grad_batches
        self._window.restore(self._window_state, self._data_group, micro_batches, self.device)
        self._window_state = {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sums token losses over a constant; ``on_before_optimizer_step`` makes the gradients those of the mean."""
        targets = count_causal_targets(batch["labels"])
        capacity = self._window.agree_on_capacity(batch["labels"], self._data_group)
        loss = self._forward(batch, num_items_in_batch=capacity).loss
        self._window.add(targets, loss * capacity)
        return loss

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Gives optimizers that read losses (searches along a line) the mean that they get gradients of."""
        assert optimizer_closure is not None
        optimizer.step(closure=partial(self._mean_loss, optimizer_closure))

    def _mean_loss(self, closure: Callable[[], Any]) -> Tensor | None:
        if closure() is None:  # a batch that training_step left out
            return None
        self._closed = self._window.close(self._data_group)
        return _mean(*self._closed)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Weighs the gradients, before clipping sees them, and logs the step."""
        group = self._data_group
        targets, loss_sum = self._closed or self._window.close(group)
        self._closed = None
        factor = self._window.divisor(group, self.trainer.accumulate_grad_batches) / targets.clamp(min=1)
        scale_((p.grad for p in self.parameters() if p.grad is not None), factor)
        self._log_step(targets, loss_sum, optimizer)
        self._log_loads()

    def _log_loads(self) -> None:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % every == 0 and (loads := expert_loads(self)):
            self.log("train/expert_load", max(loads.values()))

    def _log_step(self, targets: Tensor, loss_sum: Tensor, optimizer: Optimizer) -> None:
        self._tokens_seen = self._tokens_seen + targets
        # Lightning reads what its own bars show after every batch, and waits for the device.
        bar = self.trainer.progress_bar_callback
        is_shown = bar is not None and not hasattr(bar, "reads_logged_metrics")
        self.log("train/loss", _mean(targets, loss_sum), prog_bar=is_shown)
        self.log("train/tokens", self._tokens_seen.float())
        # A tensor stays where it is; Lightning copies a number to the device in every step, and waits for it.
        self.log("lr", torch.as_tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64), prog_bar=is_shown)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to ``val/loss`` and ``val/perplexity``."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds to ``test/loss`` and ``test/perplexity``."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """Scores given texts.

        Returns:
            ``log_likelihood``, float32 [batch], natural logarithm, and ``tokens``, int64 [batch], how many it sums.
        """
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self._forward(inputs).logits[:, :-1].float()  # [batch, seq - 1, vocab]
        targets = batch["labels"][:, 1:]  # [batch, seq - 1]
        losses = cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        return {"log_likelihood": -losses.sum(1), "tokens": (targets != IGNORED).sum(1)}

    def _evaluate(self, batch: Batch, split: str) -> None:
        targets = count_causal_targets(batch["labels"])
        loss_sum = self._forward(batch, num_items_in_batch=1).loss
        for name, metric in self.metrics[split].items():  # type: ignore[operator]
            metric.update(loss_sum, targets)
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True, prog_bar=name == "loss")

    # ---- state -------------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Self:
        """Loads a checkpoint of either kind, as Lightning does; the base of an adapter comes from ``model``."""
        let_lightning_read_folders()
        return super().load_from_checkpoint(*args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the number of tokens seen, and those of a step that is not complete."""
        checkpoint["tokens_seen"] = float(self._tokens_seen)
        if hasattr(self.trainer.strategy, "accumulated_gradients"):  # else they are lost, and so must be their tokens
            checkpoint["token_window"] = self._window.state(self._data_group, self.trainer.accumulate_grad_batches)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on counting tokens where the checkpoint stopped; adds what ``load_from_checkpoint`` misses of a base."""
        if self._trainer is None and self.peft is not None and self.model is not None:
            named = self.named_parameters(remove_duplicate=False)
            base = {name for name, parameter in named if not parameter.requires_grad}
            held = {name: value for name, value in self.state_dict().items() if name in base}
            checkpoint["state_dict"] = {**held, **checkpoint["state_dict"]}
        self._tokens_seen = torch.tensor(checkpoint.get("tokens_seen", 0.0), dtype=torch.float64)
        self._window_state = checkpoint.get("token_window", {})

    def _forward(self, batch: Batch, **kwargs: Any) -> Any:
        assert self.model is not None, "configure_model has not run"
        return self.model(**batch, use_cache=False, **kwargs)

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that hold different data; ``None`` if there is only this one."""
        strategy = self.trainer.strategy
        if hasattr(strategy, "data_group"):
            return strategy.data_group
        return dist.group.WORLD if dist.is_initialized() and self.trainer.world_size > 1 else None


def _mean(targets: Tensor, loss_sum: Tensor) -> Tensor:
    return (loss_sum / targets.clamp(min=1)).float()
