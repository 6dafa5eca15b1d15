"""Adapters from the configuration: trained, kept alone in checkpoints, resumed elsewhere, exported for plain peft."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel._compat.fsdp2.units import parameter_groups
from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.finetuning import CausalLM, HuggingFaceExport, TextDataModule
from lightning_automodel.testing.pool import Pool

FIELDS: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"], "use_rslora": True}


def data_of(model_dir: Path, directory: Path, size: int = 1) -> TextDataModule:
    text = directory / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 30)
    files = {"train_files": str(text), "val_files": str(text), "cache_dir": str(directory)}
    return TextDataModule(tokenizer=str(model_dir), sequence_length=32, batch_size=4 // size, packing=True, **files)


def module_of(model_dir: Path, **fields: Any) -> CausalLM:
    torch.manual_seed(3)
    return CausalLM(str(model_dir), optimizer=lambda p: torch.optim.Adam(p, lr=0.02), lr_scheduler=None, **fields)


def fit(
    model_dir: Path, directory: Path, sizes: dict[str, int], steps: int, resume: Path | None = None, **fields: Any
) -> tuple[float, L.Trainer]:
    saver = ModelCheckpoint(dirpath=directory, filename=f"{steps}", every_n_train_steps=steps)
    exports = [HuggingFaceExport(str(directory / "peft")), HuggingFaceExport(str(directory / "merged"), merge=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDP2TPStrategy(**sizes),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saver, *exports] if fields.get("peft") else [saver],
        default_root_dir=directory,
    )
    data = data_of(model_dir, directory, sizes.get("dp_shard", 1))
    trainer.fit(module_of(model_dir, **fields), data, ckpt_path=resume)
    return float(trainer.validate(trainer.lightning_module, data, verbose=False)[0]["val/loss"]), trainer


def held_out_loss(model: Any, model_dir: Path, directory: Path) -> float:
    data = data_of(model_dir, directory)
    data.setup("validate")
    losses = []
    with torch.no_grad():
        for batch in data.val_dataloader():
            targets = int((batch["labels"][:, 1:] != -100).sum())
            losses.append((float(model.eval()(**batch, use_cache=False).loss) * targets, targets))
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)


def trained(model_dir: Path, directory: Path) -> dict[str, Any]:
    """Runs on each rank: two steps with tp=2, two more with dp_shard=2."""
    before, _ = fit(model_dir, directory, {"tp": 2}, 2, peft=FIELDS)
    checkpoint = directory / "2.ckpt"
    names = set(read_checkpoint(Location.of(checkpoint))["state_dict"])
    after, trainer = fit(model_dir, directory, {"dp_shard": 2}, 4, resume=checkpoint, peft=LoraConfig(**FIELDS))
    straight, _ = fit(model_dir, directory / "straight", {"dp_shard": 2}, 4, peft=FIELDS)
    return {"names": names, "losses": (before, after, straight), "frozen": count_frozen(trainer.lightning_module)}


def count_frozen(module: Any) -> list[str]:
    """Frozen parameters that take part in a reduction of gradients, have a gradient or a state."""
    (optimizer,) = module.trainer.optimizers
    found = []
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in parameter_groups(unit):
            reduced = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            assert len(reduced) < len(group.fsdp_params) or not reduced
            accumulated = [p for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
            found += [str(p) for p in accumulated if not p.sharded_param.requires_grad]
    found += [
        n for n, p in module.named_parameters() if not p.requires_grad and (p.grad is not None or p in optimizer.state)
    ]
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == sum(p.requires_grad for p in module.parameters()) > 0
    return found


@pytest.mark.slow
def test_from_training_to_plain_peft(model_dir: Path, tmp_path: Path, pool2: Pool) -> None:
    (tmp_path / "straight").mkdir()
    found = pool2.run(trained, model_dir, tmp_path, trainer=True)[0]
    assert found["frozen"] == []
    base = [
        n for n in found["names"] if "lora_" not in n and ".modules_to_save." not in n and not n.startswith("metrics")
    ]
    assert base == []
    before, after, straight = found["losses"]
    assert after == pytest.approx(straight, rel=1e-5)
    assert after < before
    export(str(tmp_path / "4.ckpt"), str(tmp_path / "from checkpoint"))
    export(str(tmp_path / "4.ckpt"), str(tmp_path / "merged from checkpoint"), merge=True)
    for name in ("peft", "from checkpoint"):
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / name)
        assert held_out_loss(adapted, model_dir, tmp_path) == pytest.approx(after, abs=1e-4), name
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            model_dir
        )
    for name in ("merged", "merged from checkpoint"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert held_out_loss(model, model_dir, tmp_path) == pytest.approx(after, abs=1e-4), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft": {"target_modules": ["q_proj", "w_proj"]}}, "'w_proj' match nothing"),
        ({"peft": {"rank": 3}}, "LoraConfig has no rank; it has .*lora_alpha"),
        ({"freeze": ["model.layers.*", "nothing.*"]}, "freeze='nothing.\\*' matches no parameter"),
        ({"freeze": ["*"]}, r"no parameter trains with CausalLM\(peft=None, freeze=\['\*'\]\)"),
    ],
)
def test_what_was_asked_and_does_nothing_is_an_error(model_dir: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module_of(model_dir, **fields).configure_model()


def test_frozen_layers_and_the_number_that_trains(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = module_of(model_dir, freeze=["model.layers.0", "model.embed_*"])
    with caplog.at_level("INFO"):
        module.configure_model()
    assert isinstance(module.model, nn.Module)
    frozen = {name for name, p in module.model.named_parameters() if not p.requires_grad}
    assert {name.split(".")[1] for name in frozen} == {"layers", "embed_tokens"}
    assert not any(name.startswith("model.layers.1") for name in frozen)
    total = sum(p.numel() for p in module.parameters())
    assert f"of {total:,} parameters train" in caplog.text


def test_frozen_layers_have_no_adapters_that_train(model_dir: Path) -> None:
    module = module_of(model_dir, peft=FIELDS, freeze=["model.layers.[1-9].*"])
    module.configure_model()
    trained = {name.removeprefix("base_model.model.") for name, p in module.model.named_parameters() if p.requires_grad}
    assert {name.rpartition("model.layers.")[2][:1] for name in trained if "lora_" in name} == {"0"}
    assert "lm_head.modules_to_save.default.weight" in trained
