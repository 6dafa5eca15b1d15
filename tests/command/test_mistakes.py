"""A mistake in a command is one line that names the key and proposes what was meant, and exit code 1."""

import gc
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from lightning_automodel import DDPStrategy, FSDP2Config
from lightning_automodel.cli import AutomodelCLI, main
from lightning_automodel.command.inputs import refuse_other_file

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")

MODEL = "--model.model=anywhere"
MISTAKES = {
    "strategy.sequence_paralel=true": "did you mean --trainer.strategy.config.sequence_parallel?",
    "strategy.sequence_parallel=true": "did you mean --trainer.strategy.config.sequence_parallel?",
    "strategy.config.sequence_paralel=true": "FSDP2Config has no 'sequence_paralel'; did you mean",
    "strategy.tp=two": "--trainer.strategy.tp=two: it takes an int",
    "max_steps=abc": "--trainer.max_steps=abc: it takes an int",
    "maxsteps=3": "did you mean --trainer.max_steps?",
    "strategy=FSDPP": "there is no such strategy",
    "precision=bf": "--trainer.precision=bf; did you mean bf16?; use one of 64, 32",
    "precision=bf16-mixd": "did you mean bf16-mixed?",
    "strategy=FSDP2TPStrat": "there is no such strategy; did you mean FSDP2TPStrategy?",
    "strategy.timeout=abc": "--trainer.strategy.timeout=abc: it takes a duration such as '0:30:00'",
    "logger=CSVLog": "there is no such class; did you mean CSVLogger?",
    "callbacks+=EarlyStop": "did you mean EarlyStopping?",
}
WORDS = {
    "": "a subcommand is missing; use one of fit, validate",
    "fitt": "did you mean fit?",
    "fit": "missing: --model.model",
    "fit --foo": "there is no option --foo",
    "fit --model.modle=x": "did you mean --model.model?",
    "fit --model=Foo": "--model=Foo: there is no such class",
    f"fit {MODEL} --model.optimizer=Adamw": "--model.optimizer=Adamw: there is no such class; did you mean AdamW?",
    f"fit {MODEL} --model.optimizer=torch.optim.AdamWW": "torch.optim.AdamWW: there is no such class; did you mean "
    "torch.optim.AdamW?",
    f"fit {MODEL} --model.optimizer=torch.optm.AdamW": "torch.optm.AdamW: there is no such class; did you mean "
    "torch.optim?",
    f"fit {MODEL} --model.lr_scheduler=WarmupCos": "there is no such class; did you mean WarmupCosine?",
    f"fit {MODEL} --model.optimizer.lr=abc": "--model.optimizer.lr=abc: it takes a float",
    f"fit {MODEL} --model.freeze=3": "--model.freeze=3: it takes a list",
    f"fit {MODEL} --model.peft.rr=8": "LoraConfig has no rr; did you mean peft.r?",
    f"fit {MODEL} --model.peft.lora_alfa=8": "did you mean peft.lora_alpha?",
    f"fit {MODEL} --model.peft.nothing_like_it=8": "LoraConfig has no nothing_like_it; it has alora_invocation_tokens",
    f"fit {MODEL} --model.peft.peft_type=LORAA": "peft has no peft_type='LORAA'; did you mean LORA?",
    "fit --strategy=FSDP2TPStrategy": "there is no option --strategy; did you mean --trainer.strategy?",
    "fit --tp=2": "there is no option --tp; did you mean --trainer.strategy.tp?",
    "fit --sequence_paralel=true": "did you mean --trainer.strategy.config.sequence_parallel?",
    "fit --max_steps=2": "did you mean --trainer.max_steps?",
    "fit --data.long_documents=splitt": "--data.long_documents=splitt; did you mean split?; use one of split, truncate",
    "fit --seed_everything=x": "--seed_everything=x: it takes a bool or an int",
    f"fit {MODEL} --model.optimizer.lrr=1": "AdamW has no 'lrr'; did you mean --model.optimizer.lr?",
    "fit --data.seq=3": "TextDataModule has no 'seq'; it has tokenizer, train_files",
    "fit --data=TextData": "did you mean TextDataModule?",
    "fit --config=/nowhere.yaml": "File does not exist: '/nowhere.yaml'",
    f"fit {MODEL} --ckpt_path={__file__}": "test_mistakes.py is no checkpoint, or a part of one",
    "export": "missing: checkpoint, output",
    "export /nowhere /nowhere/out": "there is no checkpoint at /nowhere",
    f"export {__file__} /nowhere/out": "test_mistakes.py is no checkpoint",
    "evaluate /nowhere": "evaluate needs --files",
    "evaluate /nowhere --files=/nowhere.txt": "'/nowhere.txt' matches no file",
    "evaluate /nowhere --tasks=[a] --tp=2": "--tp does nothing with --tasks; leave it out",
    "evaluate /nowhere --files=/nowhere.txt --limit=3": "--limit does nothing with --files",
    "generate /nowhere/model": "is no directory",
    "generate /nowhere/model hello": "'hello' belongs to no option; write --NAME=VALUE",
    "plan /nowhere --world=2": "'/nowhere' belongs to no option; write --NAME=VALUE",
    "plan --model=/nowhere --devices=2": "there is no option --devices",
    "plan --model=/nowhere --wrld=2": "there is no option --wrld; did you mean --world?",
    "plan --model=/nowhere --world=two": "--world=two: it takes an int",
    "plan --model=/nowhere --world=2 --sequence_paralel=true": "did you mean --sequence_parallel?",
}
CASES = {**{f"fit {MODEL} --trainer.{key}": text for key, text in MISTAKES.items()}, **WORDS}


def one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(command)
    assert exit_info.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "lightning-automodel: error:" in line]
    return line


@pytest.mark.parametrize("command", CASES)
def test_mistakes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert CASES[command] in one_line(command.split(), capsys)


def test_files_of_an_older_torch_are_read(tmp_path: Path) -> None:
    torch.save({"epoch": 0}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    refuse_other_file(tmp_path / "old.ckpt")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="a part of one"):
        refuse_other_file(tmp_path / "cut.ckpt")


def test_a_wrong_key_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {max_step: 3}\nmodel: {init_args: {model: x}}\n")
    line = one_line(["fit", f"--config={tmp_path / 'run.yaml'}"], capsys)
    assert "there is no option --trainer.max_step; did you mean --trainer.max_steps?" in line


@pytest.fixture
def namesake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package has an optimizer of a name that torch has, as bitsandbytes and optimi do."""
    package = types.ModuleType("another_package")
    package.Adadelta = type("Adadelta", (torch.optim.SGD,), {"__module__": package.__name__})
    monkeypatch.setitem(sys.modules, package.__name__, package)
    yield
    del package.Adadelta
    gc.collect()


@pytest.mark.parametrize("given", ["--model.optimizer=Adadelta", "--model.optimizer Adadelta"])
def test_a_short_name_of_an_optimizer_is_torchs(namesake: None, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", MODEL, *given.split(), "--model.optimizer.lr=1", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.Adadelta"


def test_a_short_name_of_several_classes_is_one_line(
    namesake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {init_args: {model: x, optimizer: {class_path: Adadelta}}}\n")
    line = one_line(["fit", f"--config={path}"], capsys)
    assert "Adadelta: several classes have this name; give one in full: torch.optim.Adadelta, another_package" in line


@pytest.mark.slow
def test_a_process_prints_one_line_and_nothing_of_libraries() -> None:
    command = [str(Path(sys.executable).with_name("lightning-automodel")), "fit", "--foo"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == (
        "",
        "lightning-automodel: error: there is no option --foo; --help lists them\n",
    )


def test_all_fields_of_the_configs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", MODEL, "--print_config"])
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["init_args"]["config"]["init_args"] == FSDP2Config().to_dict()


@pytest.mark.parametrize("name", ["DDPStrategy", "ddp"])
def test_ddp_means_ours(name: str) -> None:
    parsed = Built(["fit", MODEL, f"--trainer.strategy={name}"])
    assert type(parsed.trainer.strategy) is DDPStrategy


def test_only_the_first_process_of_a_node_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="1"):
        main(["fit"])
    assert "error" not in capsys.readouterr().err


class Parsed(AutomodelCLI):
    """Stops before anything is built."""

    def instantiate_classes(self) -> None:
        self.trainer = self.model = None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Built(AutomodelCLI):
    """Stops before anything runs."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.parametrize(("given", "epochs"), [("", 1), ("--trainer.max_steps=5", None), ("--trainer.max_epochs=3", 3)])
def test_a_run_that_nothing_bounds_is_one_epoch(given: str, epochs: int | None) -> None:
    parsed = Parsed(["fit", MODEL, *given.split()])
    assert parsed.config.fit.trainer.max_epochs == epochs


def test_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"lightning_automodel {metadata.version('lightning_automodel')}, torch {metadata.version('torch')}" in told
