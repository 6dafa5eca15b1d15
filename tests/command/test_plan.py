"""The subcommand ``plan`` as a user gives it: arguments, files of runs, mistakes, Ctrl-C."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_automodel.cli import main
from lightning_automodel.planner.run_file import load, read_run
from tests.support.families import tiny_config


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = tiny_config("llama", num_hidden_layers=6)
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_command_plans_a_run(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", f"--model={model_folder}", "--world=16", "--tp=2", "--seq=64", "--micro-batch=2", "--gpu=h200"]
    main([*args, "--sequence-parallel=true", "--activation_checkpointing=selective"])
    text = capsys.readouterr().out
    assert "16 ranks on 2 nodes of 8 h200" in text
    assert "A step: 2 x 64 tokens x 8 data ranks = 1,024 tokens" in text
    assert "reduce_scatter  tp" in text


@pytest.mark.slow
def test_the_command_reads_what_a_run_prints_of_itself(
    model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = {
        "trainer": {
            "devices": "2",
            "num_nodes": 2,
            "gradient_clip_val": None,
            "strategy": {
                "class_path": "lightning_automodel.FSDP2TPStrategy",
                "init_args": {
                    "tp": 2,
                    "dp_shard": "auto",
                    "config": {
                        "class_path": "lightning_automodel.FSDP2Config",
                        "init_args": {"sequence_parallel": True, "mp_policy": None},
                    },
                },
            },
        },
        "model": {
            "class_path": "lightning_automodel.finetuning.CausalLM",
            "init_args": {"model": str(model_folder), "peft": {"r": 4}, "freeze": ["model.layers.0.*"]},
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(printed))
    main(["plan", f"--config={path}"])
    text = capsys.readouterr().out
    assert "4 ranks on 1 node" in text
    assert "reduce_scatter  tp" in text
    assert "self_attn.q_proj.lora_A.default.weight" in text
    assert " train, precision bf16-mixed" in text


def test_the_command_reads_what_is_written_by_hand(
    model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``fit`` takes arguments of the default classes beside ``class_path``, too."""
    form = {"quant_method": "mxfp4", "dequantize": True}
    written = {
        "trainer": {"devices": 2, "strategy": {"class_path": "FSDP2TPStrategy", "init_args": {"tp": 2}}},
        "model": {"model": str(model_folder), "model_kwargs": {"quantization_config": form, "num_hidden_layers": 1}},
        "data": {"sequence_length": 64},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(written))
    main(["plan", f"--config={path}"])
    text = capsys.readouterr().out
    assert "A step: 1 x 64 tokens x 1 data rank" in text
    assert "upper bound" not in text
    assert "layers.1." not in text


@pytest.mark.long
def test_the_command_reads_and_writes_a_run(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_folder.parent / "run.yaml"
    adapters = ["--peft.r=4", "--peft.target_modules=all-linear"]
    main(["plan", f"--model={model_folder}", "--world=16", "--tp=2", "--seq=64", f"--write={path}", *adapters])
    first = capsys.readouterr().out
    told = yaml.safe_load(path.read_text())
    assert told["model"]["init_args"]["peft"] == {"r": 4, "target_modules": "all-linear"}
    assert told["trainer"]["strategy"]["init_args"]["tp"] == 2
    main(["plan", f"--config={path}"])
    assert capsys.readouterr().out == first.partition("The run is written")[0]


def planned(path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """What is said of a run with these sections of its file, beside those of a small one."""
    run: dict[str, Any] = {"trainer": {"devices": 2}, "data": {"sequence_length": 64}, **changes}
    file = path.parent / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    main(["plan", f"--config={file}"])
    return capsys.readouterr().out


def test_the_optimizer_of_a_run_is_planned(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW was planned for every run, which has two states for each parameter; SGD has none, with momentum one."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256}
    kept = []
    for optimizer in (
        {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
        {"class_path": "optimi.AdamW", "init_args": {"lr": 0.1}},
    ):
        model = {"model": str(model_folder), "model_kwargs": wide, "optimizer": optimizer}
        found = re.search(r"^  optimizer +([\d.]+)", planned(model_folder, capsys, model=model), re.MULTILINE)
        kept.append(float(found.group(1)) if found else 0.0)
    assert kept[0] == 0 < kept[1]
    assert kept[2] == pytest.approx(2 * kept[1], abs=0.02)


def test_what_a_callback_keeps_is_told(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = {"devices": 2, "callbacks": [{"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging"}]}
    text = planned(model_folder, capsys, trainer=trainer, model={"model": str(model_folder)})
    assert "EMAWeightAveraging is not planned: its copy of the weights takes" in text


def test_what_is_no_field_of_the_config_is_told(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled field was left out of the plan without a word."""
    model = {"model": str(model_folder), "model_kwargs": {"num_hiden_layers": 1, "dtype": "bfloat16"}}
    text = planned(model_folder, capsys, model=model)
    assert "model_kwargs.num_hiden_layers is no field of LlamaConfig, and not planned" in text
    assert "model_kwargs.dtype" not in text


@pytest.mark.parametrize(
    ("devices", "nodes", "world"), [("0,1", "2", 4), ([0, 3], None, 2), ("1,", 1, 1), ("2", 2, 4), ("auto", 1, None)]
)
def test_processes_of_a_run_are_counted(tmp_path: Path, devices: Any, nodes: Any, world: int | None) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": {"devices": devices, "num_nodes": nodes}}))
    path = str(tmp_path / "run.yaml")
    assert read_run(path, load(path)).get("world") == world


@pytest.mark.parametrize(("text", "said"), [("[1, 2]", "has no sections"), ("a: [", "is no YAML: while parsing")])
def test_a_file_that_is_none_of_a_run_is_one_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", f"--config={tmp_path / 'run.yaml'}"])
    assert said in capsys.readouterr().err


def test_what_is_not_planned_stays_in_the_file(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was written as a CausalLM that reads its weights, whose gradients are clipped, of no files."""
    scratch = {"model": str(model_folder), "from_scratch": True, "lr_scheduler": None}
    strategy = {"class_path": "FSDP2TPStrategy", "init_args": {"dp_shard": 2, "save_distributed_checkpoint": False}}
    run = {
        "seed_everything": 3,
        "trainer": {"devices": 2, "gradient_clip_val": None, "max_steps": 5, "strategy": strategy},
        "model": {"class_path": "ImageTextLM", "init_args": scratch},
        "data": {"class_path": "ImageTextDataModule", "init_args": {"train_files": "a.jsonl", "sequence_length": 64}},
    }
    paths = [model_folder.parent / name for name in ("run.yaml", "written.yaml")]
    paths[0].write_text(yaml.safe_dump(run))
    main(["plan", f"--config={paths[0]}", f"--write={paths[1]}", "--tp=2", "--dp_shard=auto"])
    assert capsys.readouterr().out.endswith(f"fit --config={paths[1]}\n")
    told = yaml.safe_load(paths[1].read_text())
    assert told["seed_everything"] == 3
    assert told["model"] == run["model"]
    assert told["data"]["class_path"] == "ImageTextDataModule"
    assert told["data"]["init_args"] == {"train_files": "a.jsonl", "sequence_length": 64, "batch_size": 1}
    trainer = told["trainer"]
    assert (trainer["gradient_clip_val"], trainer["max_steps"], trainer["devices"]) == (None, 5, 2)
    arguments = trainer["strategy"]["init_args"]
    assert (arguments["tp"], arguments["save_distributed_checkpoint"], "dp_shard" in arguments) == (2, False, False)


def test_a_model_that_reads_images_is_written_as_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_config("llava").save_pretrained(tmp_path / "model")
    path = tmp_path / "run.yaml"
    main(["plan", f"--model={tmp_path / 'model'}", "--world=2", "--seq=64", f"--write={path}"])
    capsys.readouterr()
    told = yaml.safe_load(path.read_text())
    names = [told[section]["class_path"].rpartition(".")[2] for section in ("model", "data")]
    assert names == ["ImageTextLM", "ImageTextDataModule"]


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def folder_with_code(path: Path) -> Path:
    tiny_config("llama").save_pretrained(path)
    (path / "own.py").write_text(CODE)
    told = json.loads((path / "config.json").read_text())
    told |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(told))
    return path


def test_code_beside_a_config_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with_code(tmp_path)
    with pytest.raises(SystemExit):
        main(["plan", f"--model={folder}", "--world=2", "--seq=32"])
    assert "once you have read it, allow it to run with model_kwargs.trust_remote_code" in capsys.readouterr().err
    main(["plan", f"--model={folder}", "--world=2", "--seq=32", "--model_kwargs.trust_remote_code=true"])
    assert capsys.readouterr().out.startswith("OwnForCausalLM: ")


def test_mistakes_are_one_line(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (["--world=6"], "plan needs --model"),
        ([f"--model={model_folder}", "--world=0"], "world=0 is no number of processes"),
        ([f"--model={model_folder}", "--world=2", "--price=-1"], "price=-1.0 is not US dollars"),
        ([f"--model={model_folder}", "--world=6", "--tp=4"], "does not divide the 6 processes"),
        ([f"--model={model_folder}", "--world=6", "--tpp=3"], "tpp"),
        ([f"--model={model_folder}", "--world=6", "--dp_shard=4"], "does not equal the 6 processes"),
        ([f"--model={model_folder}", "--world=6", "--optimizer=SGDD"], "optimizer='SGDD'"),
        ([f"--model={model_folder}", "--world=6", "--optimizer=optimi.AdamW"], "are required: lr"),
        ([f"--model={model_folder}", "--world=6", "--optimizer=Adafactor"], "plan with another one of as many states"),
        ([f"--model={model_folder}", "--world=6", "--optimizer=Muon"], "Muon only supports 2D parameters"),
        ([f"--model={model_folder}", "--world=6", "--seq=0"], "sequence_length=0 of a step must be at least 1"),
        ([f"--model={model_folder}", "--world=6", "--accumulate=0"], "accumulation=0 of a step must be at least 1"),
        ([f"--model={model_folder}", "--world=6", "--enable-compile=true"], "plan without it"),
        ([f"--model={model_folder}", "--world=6", "--gpu=h1000"], "use one of a100"),
        ([f"--model={model_folder}", "--world=6", f"--html={model_folder}"], "is a folder; give the name of a file"),
        (
            [f"--model={model_folder}", "--world=6", f"--write={model_folder}/config.json/run.yaml"],
            "nothing can be written there",
        ),
        ([f"--model={model_folder.parent}", "--world=6"], "has no config.json"),
        ([f"--model={model_folder}/none", "--world=6"], "is no directory"),
        ([f"--model={model_folder}", "--world=6", "--peft.rank=4"], "LoraConfig has no rank"),
        ([f"--model={model_folder}", "--world=6", "--peft.target_modules=[query]"], "'query' match nothing"),
        ([f"--model={model_folder}", "--world=6", "--freeze=[layer.*]"], "freeze='layer.*' matches no parameter"),
        ([f"--model={model_folder}", "--world=6", "--freeze=[model, lm_head]"], "no parameter trains with"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", *args])
        assert message in capsys.readouterr().err


def test_an_interruption_is_one_line(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["lightning_automodel.command.plan"], "search", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["plan", f"--model={model_folder}", "--world=4", "--search"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "lightning-automodel: plan was interrupted\n"


@pytest.mark.timeout(600)  # alone less than a minute
@pytest.mark.long
def test_the_search_ranks_what_fits(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_folder.parent / "run.yaml"
    main(["plan", f"--model={model_folder}", "--world=4", "--seq=64", "--search", f"--write={path}", "--optimizer=SGD"])
    text = capsys.readouterr().out
    assert "Layouts that fit, the fastest first" in text
    assert "dp_shard=4 rows=16" in text
    assert "Layouts that fall out" not in text
    assert yaml.safe_load(path.read_text())["trainer"]["devices"] == 4
    assert yaml.safe_load(path.read_text())["model"]["init_args"]["optimizer"] == {"class_path": "torch.optim.SGD"}
