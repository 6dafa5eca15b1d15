"""The command trains, evaluates and predicts, and answers a mistake with one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from lightning_automodel.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")


@pytest.fixture
def config(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file for a short run in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"{index}: the lazy dog sleeps. " * (index + 1))
    (tmp_path / "chat.jsonl").write_text('{"prompt": "the", "completion": " fox"}\n')
    content = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 2,
            "default_root_dir": str(tmp_path / "run"),
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": "run", "version": 0},
            },
        },
        "model": {"init_args": {"model": str(model_dir)}},
        "data": {
            "init_args": {
                "train_files": "*.txt",
                "val_fraction": 0.25,
                "test_files": "*.txt",
                "predict_files": ["chat.jsonl"],
                "sequence_length": 32,
                "cache_dir": "cache",
            }
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.slow
def test_fit_twice_then_evaluate_and_predict(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--config", str(config), "--trainer.strategy=auto"]
    for _ in range(2):
        main(["fit", *common, "--model.optimizer=SGD", "--model.optimizer.lr=0.5", "--trainer.log_every_n_steps=1"])
    shown = capsys.readouterr().out
    assert all(f"{name}=" in shown for name in ("loss", "lr", "norm", "tokens/s", "tokens"))
    assert "2/2" in shown
    logged = (tmp_path / "run/lightning_logs/version_0/metrics.csv").read_text()
    assert all(f"train/{name}" in logged for name in ("tokens_per_second", "gradient_norm", "eta_seconds"))
    saved = yaml.safe_load((tmp_path / "run/lightning_logs/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.5
    for command in ("validate", "test"):
        main([command, *common])
    assert "test/loss" in capsys.readouterr().out
    main(["predict", *common, "--data.predict_files=*.txt", "--data.batch_size=3", "--output=scores.jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows if row["first_token"] == 0] == [f"{index}.txt" for index in range(8)]
    assert all(row["log_likelihood"] < 0 < row["tokens"] <= 31 for row in rows)


def test_without_a_logger_the_users_file_stays(config: Path) -> None:
    written = config.read_text()
    here = ["--trainer.logger=false", "--trainer.default_root_dir=null"]  # the working directory
    main(["fit", "--config", str(config), "--trainer.strategy=auto", *here])
    assert config.read_text() == written


def test_an_adapter_by_switches(config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = yaml.safe_load(config.read_text())
    content["model"]["init_args"]["peft"] = {"r": 4, "target_modules": "all-linear"}
    config.write_text(yaml.safe_dump(content))
    with caplog.at_level("INFO"):
        main(["fit", "--config", str(config), "--trainer.strategy=auto", "--model.peft.r=2"])
    saved = yaml.safe_load((tmp_path / "run/lightning_logs/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["peft"] == {"r": 2, "target_modules": "all-linear"}
    assert "parameters train" in caplog.text


@pytest.mark.long
def test_our_refusals_are_one_line_and_exit_code_1(
    config: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder_decoder = tmp_path / "t5"
    encoder_decoder.mkdir()
    (encoder_decoder / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    (encoder_decoder / "model.safetensors").touch()
    larger = tmp_path / "larger"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([*(f"<{index}>" for index in range(len(tokenizer), 320)), "sleeps"])
    tokenizer.save_pretrained(larger)
    mistakes = {
        f"--model.model={encoder_decoder}": "is an encoder-decoder (T5Config)",
        f"--data.tokenizer={larger}": "the data hold token 320 of tokenizer",
        "--data.cache_dir=/proc/x": "--data.cache_dir=/proc/x: nothing can be written there (No such file",
        "--trainer.default_root_dir=/proc/x": "--trainer.default_root_dir=/proc/x: nothing can be written there",
        "--trainer.devices=x": "`devices` selected with `CPUAccelerator` should be an int > 0.",
        "--trainer.accelerator=cuda": "`CUDAAccelerator` can not run on your system",
        "--model.model=/nowhere/model": "model='/nowhere/model' is not a directory",
        "--model.model=no/such": "'no/such' is no directory (here: ",
        "--data.sequence_length=1": "sequence_length=1: a row needs 2 tokens",
        "--data.train_files=nothing.txt": "'nothing.txt' matches no file",
        "--data.chat_template=no.jinja": "chat_template='no.jinja' cannot be read",
        "--ckpt_path=no.ckpt": "--ckpt_path=no.ckpt: there is no checkpoint at",
        "--trainer.val_check_interval=99": "`val_check_interval` (99) must be less than or equal to the number of",
        "--model.peft.rr=8": "LoraConfig has no rr",
        "--trainer.strategy.tp=0": "tp=0",
    }
    for argument, message in mistakes.items():
        strategy = [] if "strategy" in argument else ["--trainer.strategy=auto"]
        with pytest.raises(SystemExit) as exit_info:
            main(["fit", "--config", str(config), *strategy, argument])
        assert exit_info.value.code == 1
        (line,) = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-automodel: error:")
        ]
        assert message in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "cannot be read: It looks like the config file"),
        ("tokenizer.json", "is no JSON, or not all of it"),
        ("model.safetensors", "bytes; copy or download it anew"),
    ],
)
def test_damaged_files_are_named(
    config: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    os.truncate(damaged / name, (damaged / name).stat().st_size - 30)
    with pytest.raises(SystemExit, match="1"):
        main(["fit", "--config", str(config), f"--model.model={damaged}", f"--data.tokenizer={damaged}"])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_strategy_of_this_package_is_the_default(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), "--trainer.strategy.tp=2", "--print_config"])
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"].endswith("FSDP2TPStrategy")
    assert strategy["init_args"]["tp"] == 2


def test_errors_of_others_keep_their_traceback(config: Path) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        main(["fit", "--config", str(config), "--model.optimizer=SGD", "--model.optimizer.lr=-1"])


def test_a_run_says_each_line_once(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        main(["fit", "--config", str(config)])
    lines = [record.getMessage() for record in caplog.records if record.name == "lightning_automodel"]
    assert any("FSDP2 shards" in line for line in lines)
    assert sorted(line for line in set(lines) if lines.count(line) > 1) == []
