"""Precision: what is stored, computed and reduced in which dtype, and loss scaling on which all ranks agree."""

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.strategies.precision import FSDP2Precision
from lightning_automodel.strategies.steps.loss_scaling import AgreedGradScaler
from lightning_automodel.testing.pool import Pool
from tests.strategies.modules import CONFIG, TinyModule, loader, trainer
from tests.support.marks import with_long

NAMES = ["32-true", "bf16-true", "bf16-mixed", "16-mixed"]


# ---- choice, without processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FSDP2TPStrategy, lambda: "fsdp2_tp"], ids=["instance", "name"])
@pytest.mark.parametrize("precision", [*NAMES, "bf16", 32])
def test_the_users_precision_counts(precision: Any, strategy: Any) -> None:
    run = L.Trainer(accelerator="cpu", devices=1, strategy=strategy(), precision=precision, logger=False)
    expected = {"bf16": "bf16-mixed", 32: "32-true"}.get(precision, precision)
    assert run.precision == run.precision_plugin.precision == expected


@pytest.mark.parametrize("precision", ["64-true", "16-true", "transformer-engine"])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=rf"precision='{precision}'.*'bf16-mixed'"):
        L.Trainer(accelerator="cpu", devices=1, strategy=FSDP2TPStrategy(), precision=precision)


def test_other_plugins_are_refused() -> None:
    with pytest.raises(ValueError, match=r"DoublePrecision .*'64-true'.* use Trainer\(precision="):
        L.Trainer(accelerator="cpu", devices=1, strategy=FSDP2TPStrategy(), plugins=DoublePrecision())


def test_contexts_change_no_default() -> None:
    strategy = FSDP2TPStrategy()
    plugin = trainer(1, strategy, precision="bf16-true").precision_plugin
    contexts = [
        plugin.forward_context,
        plugin.tensor_init_context,
        plugin.module_init_context,
        strategy.tensor_init_context,
    ]
    for context in contexts:
        with context():
            assert torch.get_default_dtype() == torch.float32
            assert not torch.is_autocast_enabled("cpu")
    values = [torch.ones(1), torch.ones(1, dtype=torch.long)]
    assert plugin.convert_input(values) is values
    assert plugin.convert_output(values) is values


def test_what_lightning_does() -> None:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))

    def stock(precision: Any) -> Any:
        return L.Trainer(
            accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), precision=precision, logger=False
        )

    with pytest.raises(ValueError, match="does not support"):
        stock("16-mixed")
    with stock("bf16-mixed").precision_plugin.forward_context():
        assert torch.is_autocast_enabled("cpu")
    assert stock("bf16-true").precision_plugin.convert_module(model).model.rotary_emb.inv_freq.dtype == torch.bfloat16


# ---- dtypes on ranks -------------------------------------------------------------------------------------------------


class Observed(TinyModule):
    """Notes dtypes while training."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0])
        weight = self.model.model.norm.weight
        self.notes.update(
            autocast=torch.is_autocast_enabled("cpu"),
            default=torch.get_default_dtype(),
            logits=output.logits.dtype,
            gathered=weight.dtype,
            loss=output.loss.item(),
        )
        return output.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes["gradients"] = {p.grad.dtype for p in self.parameters() if p.grad is not None}
        self.notes["norm"] = norm([p.grad for p in self.parameters() if p.grad is not None])

    def on_train_end(self) -> None:
        self.notes["parameters"] = {p.dtype for p in self.parameters()}
        rotary = self.model.model.rotary_emb
        self.notes["inv_freq"] = rotary.inv_freq
        cosine, _ = rotary(torch.zeros(1), torch.tensor([[4096]]))
        self.notes["cosine"] = cosine


def norm(tensors: list[Tensor]) -> float:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return float(torch.stack([t.double().square().sum() for t in whole]).sum().sqrt())


def observe(precision: Any, tp: int, policy: MixedPrecisionPolicy | None = None) -> dict[str, Any]:
    module = Observed()
    config = FSDP2Config(mp_policy=policy)
    trainer(2, {"tp": tp, "config": config}, precision=precision).fit(module, loader(4, 2))
    return module.notes


STORED = {"bf16-true": torch.bfloat16}
COMPUTED = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@pytest.mark.parametrize("precision", NAMES)
def test_dtypes(precision: str, pool2: Pool) -> None:
    exact = pool2.run(observe, "32-true", 2, trainer=True)[0]
    for notes in pool2.run(observe, precision, 2, trainer=True):
        stored, computed = STORED.get(precision, torch.float32), COMPUTED.get(precision, torch.float32)
        assert (notes["parameters"], notes["gradients"]) == ({stored}, {stored})
        assert (notes["gathered"], notes["logits"]) == (computed, computed)
        assert (notes["autocast"], notes["default"]) == (False, torch.float32)
        assert notes["inv_freq"].dtype == torch.float32
        assert torch.equal(notes["cosine"], exact["cosine"])
        for number in ("loss", "norm"):  # of gradients that are no longer scaled
            assert notes[number] == pytest.approx(exact[number], rel=2e-2)


def test_a_policy_overrides_the_precision(pool2: Pool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    notes = pool2.run(observe, "bf16-mixed", 1, policy, trainer=True)[0]
    assert (notes["gathered"], notes["logits"], notes["parameters"]) == (torch.float16, torch.float16, {torch.float32})


# ---- clipping and loss scaling ---------------------------------------------------------------------------------------


class Overflowing(TinyModule):
    """Notes each step's change of the weights; in step 1 a gradient of rank 1 overflows."""

    def __init__(self, fused: bool, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.fused = fused
        self.changes: list[float] = []
        self.largest: list[float] = []
        self.scales: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.fused:
            return torch.optim.AdamW(self.parameters(), lr=CLIP, weight_decay=0.0, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def on_after_backward(self) -> None:
        if (self.trainer.global_step, os.environ["RANK"]) == (1, "1"):
            self.model.model.norm.weight.grad.to_local()[:1] = float("inf")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        changes = [p.detach() - b for p, b in zip(self.parameters(), self.before, strict=True)]
        self.changes.append(norm(changes))
        self.largest.append(max(float(change.full_tensor().abs().max()) for change in changes))  # type: ignore[attr-defined]
        self.scales.append(self.trainer.precision_plugin.state_dict()["scale"])


CLIP = 0.01


def scaled(tp: int, directory: Any, fused: bool = False, manual: bool = False, by: str = "norm") -> dict[str, Any]:
    """Four steps, a checkpoint, and two more steps from there."""
    settings: dict[str, Any] = {} if manual else {"gradient_clip_val": CLIP, "gradient_clip_algorithm": by}
    module, data = Overflowing(fused, manual), loader(8, tp)
    run = trainer(2, {"tp": tp}, precision="16-mixed", **settings)
    run.fit(module, data)
    run.save_checkpoint(directory / "checkpoint")
    resumed = Overflowing(fused, manual)
    again = trainer(2, {"tp": tp}, precision="16-mixed", max_steps=6, max_epochs=-1, **settings)
    again.fit(resumed, data, ckpt_path=directory / "checkpoint")
    return {name: getattr(module, name) for name in ("changes", "largest", "scales")} | {"resumed": resumed.scales}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "settings"), with_long([(1, {}), (2, {"fused": True}), (1, {"manual": True}), (2, {"by": "value"})], (1, {}))
)
def test_all_ranks_skip_a_step_that_overflows_on_one(tp: int, settings: dict[str, Any], pool2: Pool) -> None:
    results = pool2.run(scaled, tp, trainer=True, with_directory=True, **settings)
    assert results[0] == results[1]
    norm_is_clipped = settings in ({}, {"manual": True})
    for number, change in enumerate(results[0]["changes" if norm_is_clipped else "largest"]):
        # Adam's early steps are about as large as its learning rate.
        assert change == (0 if number == 1 else pytest.approx(CLIP, rel=0.1 if "fused" in settings else 1e-3))
    assert results[0]["scales"] == [65536, 32768, 32768, 32768]
    assert results[0]["resumed"] == [32768, 32768]


def stock_scaler_steps() -> list[float]:
    """With torch's own scaler a rank decides for itself."""
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    if os.environ["RANK"] == "1":
        assert weight.grad is not None
        weight.grad[0] = float("inf")
    scaler.step(optimizer)
    return weight.tolist()


def test_torchs_scaler_lets_ranks_differ(pool2: Pool) -> None:
    assert pool2.run(stock_scaler_steps) == [[0, 0], [1, 1]]


def test_the_scale_is_that_of_lightnings_own_checkpoints() -> None:
    ours = FSDP2Precision("16-mixed")
    stock = MixedPrecision("16-mixed", "cpu", AgreedGradScaler("cpu", init_scale=8.0))
    ours.connect(torch.nn.Linear(1, 1), [], [])
    ours.on_load_checkpoint({"MixedPrecision": stock.state_dict()})
    saved: dict[str, Any] = {}
    ours.on_save_checkpoint(saved)
    assert saved["MixedPrecision"] == ours.state_dict() == stock.state_dict()
    assert saved["MixedPrecision"]["scale"] == 8.0


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_equals_torchs_on_one_device(fused: bool) -> None:
    settings: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
    scalers = [torch.amp.GradScaler("cpu", **settings), AgreedGradScaler("cpu", **settings)]
    histories = []
    for scaler in scalers:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
        history: list[Any] = []
        for step in range(7):
            optimizer.zero_grad()
            scaler.scale((weight * (float("inf") if step == 3 else step)).sum()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if isinstance(scaler, AgreedGradScaler):
                scaler.settle()
            else:
                scaler.update()
            history.append((weight.tolist(), scaler.state_dict()))
        histories.append(history)
    assert histories[0] == histories[1]


def test_the_scale_stays_while_several_optimizers_step() -> None:
    scaler = AgreedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [weight.item() for weight in weights] == [0, 0]
    assert scaler.state_dict()["scale"] == 16
