"""The main job from end to end on a machine without a GPU: python -m examples.quickstart.

    make a checkpoint -> fit on two processes, stop -> resume to the end -> judge the export with transformers alone

Exits non-zero if the loss did not fall, or if the exported model's loss is not the trainer's.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import yaml

from examples.records import write_records
from lightning_automodel.finetuning import TextDataModule
from lightning_automodel.finetuning.data import token_rows

CONFIG = Path(__file__).with_suffix(".yaml")
BUILD = Path("build/quickstart")
STOP_AT = 50  # optimizer steps, half of what the configuration asks for
TOLERANCE = 1e-3


def main() -> None:
    """Runs all steps in the current directory and prints a summary."""
    started = time.monotonic()
    shutil.rmtree(BUILD, ignore_errors=True)
    announce("1/4 a small Llama checkpoint, and Python's standard library as text")
    copy_text()
    make_checkpoint()
    write_records(BUILD)  # for the other examples
    make_mixture()
    write_held_out_rows()
    announce(f"2/4 fine-tuning with tp=2, stopped after {STOP_AT} steps")
    fit(f"--trainer.max_steps={STOP_AT}")
    announce("3/4 resuming from the checkpoint")
    fit(f"--ckpt_path={last_checkpoint()}")
    announce("4/4 the export in a fresh process, with transformers alone")
    base, export = judge(BUILD / "model", BUILD / "export")
    finish(base, export, time.monotonic() - started)


def announce(step: str) -> None:
    """Prints a heading."""
    print(f"\n== {step}", flush=True)


def copy_text() -> None:
    """Copies the top-level modules of the running Python's standard library: text that every machine has."""
    folder = BUILD / "text"
    folder.mkdir(parents=True)
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        shutil.copy(source, folder)


def make_checkpoint() -> None:
    """Trains a tokenizer and writes a random Llama: the stand-in for a model that one would download."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in sorted((BUILD / "text").iterdir())], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    wrapped.save_pretrained(BUILD / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(BUILD / "model")
    print(f"{model.num_parameters() / 1e6:.1f} M parameters in {BUILD / 'model'}")


def make_mixture() -> None:
    """Writes a random mixture of experts with the same tokenizer, for ``examples/experts.yaml``."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(BUILD / "experts")
    AutoTokenizer.from_pretrained(BUILD / "model").save_pretrained(BUILD / "experts")


def write_held_out_rows() -> None:
    """Writes the rows that the trainer will validate on, for the process that knows nothing of this package."""
    arguments: dict[str, Any] = yaml.safe_load(CONFIG.read_text())["data"]["init_args"]
    data = TextDataModule(tokenizer=str(BUILD / "model"), **arguments)
    data.setup("fit")
    rows = token_rows(data.val_dataloader())
    (BUILD / "held_out.json").write_text(json.dumps(rows))
    print(f"{len(data.datasets['train'])} rows to train on, {len(rows)} held out, {data.sequence_length} tokens each")


def fit(*arguments: str) -> None:
    """Runs the command as a user would."""
    command = Path(sys.executable).with_name("lightning-automodel")
    run([str(command), "fit", f"--config={CONFIG}", *arguments])


def last_checkpoint() -> Path:
    """The checkpoint that the stopped run left."""
    return max((BUILD / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def judge(*models: Path) -> list[dict[str, Any]]:
    """Held-out loss and a sample of each model, from a process that imports nothing of ours."""
    arguments = [str(BUILD / "held_out.json"), *map(str, models)]
    output = run([sys.executable, "-m", "examples.held_out_loss", *arguments], capture=True)
    return [json.loads(line) for line in output.splitlines()]


def run(command: list[str], capture: bool = False) -> str:
    """Runs a command and ends with its exit code if it fails."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=capture)
    if done.returncode:
        sys.stderr.write(done.stderr or "")
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return done.stdout or ""


def logged() -> list[dict[str, str]]:
    """What the runs logged, in order."""
    rows: list[dict[str, str]] = []
    for path in sorted((BUILD / "logs").glob("version_*/metrics.csv")):
        with path.open() as file:
            rows += csv.DictReader(file)
    return rows


def finish(base: dict[str, Any], export: dict[str, Any], seconds: float) -> None:
    """Prints the summary; exits non-zero if the losses are not what they must be."""
    rows = logged()
    trainer_loss = [float(row["val/loss"]) for row in rows if row.get("val/loss")][-1]
    speeds = sorted(float(row["train/tokens_per_second"]) for row in rows if row.get("train/tokens_per_second"))
    print(f"\n{export['sample']}\n")
    announce(f"done in {seconds:.0f} s")
    print(f"held-out loss   {base['loss']:.4f} -> {export['loss']:.4f} (the trainer says {trainer_loss:.4f})")
    print(f"speed           {speeds[len(speeds) // 2]:.0f} tokens/s on two processes (median)")
    print(f"export          {BUILD / 'export'}")
    if not export["loss"] < base["loss"]:
        sys.exit("the held-out loss did not fall")
    if abs(export["loss"] - trainer_loss) > TOLERANCE:
        sys.exit(f"the exported model's loss differs from the trainer's by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
