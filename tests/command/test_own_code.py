"""Models and tokenizers that come with code of their own go the whole way: a run, its checkpoint, its export."""

import json
import shutil
from pathlib import Path

import pytest

from lightning_automodel.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")

MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
TRUST = "model_kwargs.trust_remote_code=true"


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny checkpoint, with classes that only its own code has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = Path(shutil.copytree(model_dir, tmp_path / "own"))
    (own / "own.py").write_text(MODEL)
    (own / "own_tokens.py").write_text(TOKENIZER)
    for name, fields in (
        (
            "config",
            {
                "model_type": "own",
                "architectures": ["OwnForCausalLM"],
                "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
            },
        ),
        (
            "tokenizer_config",
            {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokens.OwnTokenizer"]}},
        ),
    ):
        path = own / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return own


def test_nobody_runs_it_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, said in (
        (["fit", f"--model.model={folder}", "--data.train_files=text.txt"], "model_kwargs.trust_remote_code=true"),
        (["generate", str(folder), "--prompt=The"], "model_kwargs.trust_remote_code=true"),
        (["evaluate", str(folder), "--files=text.txt"], "model_kwargs.trust_remote_code=true"),
        (
            ["fit", f"--model.model={folder}", f"--data.tokenizer={folder}", "--data.train_files=text.txt"],
            "tokenizer_kwargs.trust",
        ),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert said in capsys.readouterr().err


def test_the_whole_way(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "default_root_dir": tmp_path}
    main(
        [
            "fit",
            f"--model.model={folder}",
            f"--model.{TRUST}",
            "--data.train_files=text.txt",
            "--data.sequence_length=32",
            *(f"--trainer.{name}={value}" for name, value in run.items()),
        ]
    )
    (checkpoint,) = tmp_path.glob("checkpoints/*.ckpt")
    with pytest.raises(SystemExit):
        main(["export", str(checkpoint), "export"])
    assert "OwnForCausalLM comes with code of its own, which lies at" in capsys.readouterr().err
    main(["export", str(checkpoint), "export", "--trust_remote_code=true"])
    assert {"own.py", "own_tokens.py"} <= {path.name for path in Path("export").iterdir()}
    said = []
    for model in (str(checkpoint), "export"):
        capsys.readouterr()
        main(["evaluate", model, "--files=text.txt", f"--{TRUST}", "--sequence_length=32"])
        main(["generate", model, "--prompt=The", f"--{TRUST}", "--sampling.max_new_tokens=4"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["evaluate", "export", "--files=text.txt", f"--tokenizer={folder}"])
    assert "trust_remote_code" in capsys.readouterr().err
    main(["evaluate", "export", "--files=text.txt", f"--tokenizer={folder}", f"--{TRUST}", "--sequence_length=32"])
    assert capsys.readouterr().out in said[1]

    folder.rename(tmp_path / "moved")
    command = ["export", str(checkpoint), "again", "--trust_remote_code=true"]
    with pytest.raises(SystemExit):
        main(command)
    assert "holds it beside config.json with --model_config" in capsys.readouterr().err
    main([*command, "--model_config=moved", "--tokenizer=moved"])
    assert {path.name for path in Path("again").iterdir()} == {path.name for path in Path("export").iterdir()}
    assert "loss: " in said[0]
