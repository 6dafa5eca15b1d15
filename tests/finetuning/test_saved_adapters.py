"""An adapter that was exported: its directory is a model that is judged, spoken to, planned, and trains on."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.cli import main
from lightning_automodel.command.text import Sampling, generate
from lightning_automodel.finetuning import CausalLM, HuggingFaceExport
from lightning_automodel.finetuning.pretrained import Pretrained
from lightning_automodel.planner.plan import build
from lightning_automodel.testing.pool import Pool
from tests.finetuning.test_adapters import data_of, held_out_loss

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:
    """Of LoRA, both of whose factors say something, as plain peft writes it."""
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), LoraConfig(task_type="CAUSAL_LM", **LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def _adapted(model_dir: Path, adapter: Path, **kwargs: Any) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), adapter, **kwargs)


def _trainer(directory: Path, sizes: dict[str, int], **kwargs: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=max([1, *sizes.values()]),
        strategy=FSDP2TPStrategy(**sizes),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **kwargs,
    )


def trained_on(model: str, peft: Any, directory: Path, sizes: dict[str, int], export: Path) -> float:
    """Runs on each rank: the held-out loss before two steps that are exported."""
    module = CausalLM(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), lr_scheduler=None, peft=peft)
    data = data_of(Path(Pretrained.of(model).model), directory, sizes.get("dp_shard", 1))
    before = _trainer(directory, sizes).validate(module, data, verbose=False)[0]["val/loss"]
    trainer = _trainer(directory, sizes, max_steps=2, callbacks=[HuggingFaceExport(str(export))])
    trainer.fit(module, data)
    return float(before)


@pytest.mark.slow
def test_trains_on_as_with_plain_peft(model_dir: Path, adapter: Path, tmp_path: Path, pool2: Pool) -> None:
    told = pool2.run(trained_on, str(adapter), None, tmp_path, {"tp": 2}, tmp_path / "tp", trainer=True)
    assert told[0] == pytest.approx(held_out_loss(_adapted(model_dir, adapter), model_dir, tmp_path), rel=1e-5)
    given = (str(model_dir), str(adapter), tmp_path, {"dp_shard": 2}, tmp_path / "dp")
    pool2.run(trained_on, *given, trainer=True)
    expected = _adapted(model_dir, adapter, is_trainable=True).train()
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.5)
    data = data_of(model_dir, tmp_path)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _ in range(2):
        batch = next(batches)
        optimizer.zero_grad()
        expected(**batch, use_cache=False).loss.backward()
        optimizer.step()
    for exported in ("tp", "dp"):
        found = dict(_adapted(model_dir, tmp_path / exported).named_parameters())
        for name, parameter in expected.named_parameters():
            difference = (found[name] - parameter).norm() / parameter.norm().clamp(min=1e-3)
            assert float(difference) < 1e-5, (exported, name)


def test_is_judged_spoken_to_and_planned(
    model_dir: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_of(model_dir, tmp_path)
    given = [f"--files={tmp_path}/text.txt", "--sequence_length=32", f"--output={tmp_path}/numbers.json"]
    main(["evaluate", str(adapter), *given])
    expected = _adapted(model_dir, adapter).eval()
    found = json.loads((tmp_path / "numbers.json").read_text())
    module = CausalLM(str(adapter))
    assert module.tokenizer_name == module.model_name == str(model_dir)

    data = data_of(model_dir, tmp_path)
    data.setup("validate")
    logged = _trainer(tmp_path, {}).validate(module, data, verbose=False)[0]
    assert logged["val/loss"] == pytest.approx(held_out_loss(expected, model_dir, tmp_path), rel=1e-5)
    assert abs(found["loss"] - held_out_loss(expected.unload(), model_dir, tmp_path)) > 0.01  # the base's is another

    capsys.readouterr()
    generate(str(adapter), "the quick", sampling=Sampling(max_new_tokens=6))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
    answer = _adapted(model_dir, adapter).eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert capsys.readouterr().out.strip() == tokenizer.decode(answer[0, ids.shape[1] :]).strip()

    planned, asked = build(str(adapter)), build(str(model_dir), LORA)
    trains = [[(n, p.shape) for n, p in m.named_parameters() if p.requires_grad] for m in (planned, asked)]
    assert trains[0] == trains[1] != []
    with pytest.raises(ValueError, match=rf"'{adapter}' is an adapter, and peft=.* would be a second one"):
        build(str(adapter), LORA)


def test_checkpoints_hold_what_trains(model_dir: Path, adapter: Path, tmp_path: Path) -> None:
    module, trainer = CausalLM(str(adapter)), _trainer(tmp_path, {}, max_steps=1)
    trainer.fit(module, data_of(model_dir, tmp_path))
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    names = set(read_checkpoint(Location.of(tmp_path / "1.ckpt"))["state_dict"])
    assert names == {name for name, parameter in module.named_parameters() if parameter.requires_grad} != set()


def test_brings_its_tokenizer(model_dir: Path, adapter: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(adapter)
    module, data = CausalLM(str(adapter)), data_of(model_dir, tmp_path)
    data.tokenizer = None
    _trainer(tmp_path, {}).validate(module, data, verbose=False)
    assert (module.model_name, module.tokenizer_name) == (str(model_dir), str(adapter))
    assert data.loaded_tokenizer.chat_template == tokenizer.chat_template


def test_a_prompt_is_judged_and_does_not_train_on(model_dir: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)
    model.save_pretrained(tmp_path / "prompt")
    module, data = CausalLM(str(tmp_path / "prompt")), data_of(model_dir, tmp_path)
    logged = _trainer(tmp_path, {}).validate(module, data, verbose=False)[0]
    expected = held_out_loss(_adapted(model_dir, tmp_path / "prompt"), model_dir, tmp_path)
    assert logged["val/loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"peft='.*prompt'.* is a prompt, which peft does not train on"):
        _trainer(tmp_path, {}, max_steps=1).fit(module, data)
    with pytest.raises(ValueError, match=r"peft='.*prompt'.* is a prompt, which peft does not train on"):
        build(str(tmp_path / "prompt"))  # what is planned is training


def test_what_cannot_be_read_is_said_before_anything_is_started(model_dir: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{adapter}' is an adapter, and peft=.* would be a second one"):
        CausalLM(str(adapter), peft=LORA)
    with pytest.raises(ValueError, match=rf"peft='{model_dir}' holds no adapter_config.json \(it holds .*config.json"):
        CausalLM(str(model_dir), peft=str(model_dir))
    with pytest.raises(ValueError, match=r"peft='./nowhere' is no saved adapter \(here: "):
        CausalLM(str(model_dir), peft="./nowhere")
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "moved")}))
    with pytest.raises(ValueError, match=rf"'{adapter}' is an adapter of '{tmp_path}/moved', which cannot be read"):
        CausalLM(str(adapter))
    assert CausalLM(str(model_dir), peft=str(adapter)).model_name == str(model_dir)
    path.write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=rf"'{adapter}' is an adapter whose adapter_config.json does not say for"):
        CausalLM(str(adapter))
    path.write_text("{")
    with pytest.raises(ValueError, match=rf"a file of '{adapter}' is no JSON"):
        CausalLM(str(adapter))
    for wrong in ([config], None, {name: value for name, value in config.items() if name != "peft_type"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(
            ValueError, match=rf"peft='{adapter}': its adapter_config.json holds not the fields of an ad"
        ):
            CausalLM(str(model_dir), peft=str(adapter))
    path.write_text(json.dumps([config]))
    with pytest.raises(ValueError, match=rf"'{path}' holds a list, and not the fields of an adapter; copy or export"):
        CausalLM(str(adapter))
    path.write_text(json.dumps({**config, "base_model_name_or_path": ["a base"]}))
    with pytest.raises(ValueError, match=r"does not say for which model \(base_model_name_or_path=\['a base'\]\)"):
        CausalLM(str(adapter))
    path.write_text(json.dumps({**config, "peft_type": "NEWER"}))
    with pytest.raises(ValueError, match=rf"peft='{adapter}' is of peft_type 'NEWER', which this version of peft"):
        CausalLM(str(adapter))
    path.write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"the adapter '{adapter}' cannot be read: .*; copy or export it anew"):
        CausalLM(str(adapter)).configure_model()
    weights.unlink()
    with pytest.raises(ValueError, match=rf"'{adapter}' has none of adapter_model.safetensors, .*holds README.md, ada"):
        CausalLM(str(adapter))


def test_a_base_beside_another_folder_is_named_with_its_adapter(adapter: Path, tmp_path: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "runs/base"}))
    message = rf"'{adapter}' is an adapter of 'runs/base', which cannot be read \(here: .*'runs/base' is no directory"
    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, {}).validate(CausalLM(str(adapter)), DataLoader([0]), verbose=False)
    with pytest.raises(ValueError, match=message):
        build(str(adapter))


def test_paths_are_taken_as_users_write_them(
    model_dir: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").symlink_to(model_dir)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "~/base"}))
    for model, peft in (("~/adapter", None), (adapter, None), ("~/base", "~/adapter"), (Path("~/base"), adapter)):
        module = CausalLM(model, peft=peft)  # type: ignore[arg-type]
        module.configure_model()
        assert (module.model_name, module.peft) == (str(tmp_path / "base"), str(adapter))
        assert build(model, peft).get_base_model().lm_head.modules_to_save  # type: ignore[operator,union-attr]


@pytest.mark.parametrize(
    ("change", "targets", "message"),
    [
        ({"num_hidden_layers": 3}, ["q_proj", "o_proj"], r"is of another model than .*missing.*layers\.2\.self_attn"),
        ({"intermediate_size": 48}, "all-linear", r"is of another model than .*size mismatch"),
        (
            {"num_hidden_layers": 1},
            ["q_proj", "o_proj"],
            r"is of another model than .*holds more, .*layers\.1\.self_attn",
        ),
        ({"num_hidden_layers": 1}, "all-linear", r"target_modules of peft: 'model\.layers\.1\..* match nothing"),
    ],
)
def test_an_adapter_of_another_model_is_an_error(
    model_dir: Path, tmp_path: Path, change: dict[str, int], targets: Any, message: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    get_peft_model(base, LoraConfig(r=4, target_modules=targets)).save_pretrained(tmp_path / "adapter")
    config = LlamaConfig.from_pretrained(model_dir)
    for name, value in change.items():
        setattr(config, name, value)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    module = CausalLM(str(tmp_path / "other"), peft=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, {}).validate(module, DataLoader([0]), verbose=False)
