"""examples/lora.yaml as a user runs it: held-out loss of the adapter and of the merged model in fresh processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("lightning-automodel"))
CONFIG = str(ROOT / "examples" / "lora.yaml")
TOLERANCE = 1e-4

QUICKSTART = """
from examples import quickstart
quickstart.copy_text()
quickstart.make_checkpoint()
quickstart.fit("--trainer.max_steps=20")
"""
ROWS = """
import json, sys, yaml
from lightning_automodel.finetuning import TextDataModule
from lightning_automodel.finetuning.data import token_rows
arguments = yaml.safe_load(open(sys.argv[1]).read())["data"]["init_args"]
data = TextDataModule(tokenizer="build/quickstart/export", **arguments)
data.setup("validate")
open("rows.json", "w").write(json.dumps(token_rows(data.val_dataloader())))
"""
JUDGE = """
import json
from peft import PeftModel
from transformers import AutoModelForCausalLM
from examples.held_out_loss import mean_loss
rows = json.load(open("rows.json"))
base = AutoModelForCausalLM.from_pretrained("build/quickstart/export").eval()
print("base", mean_loss(base, rows))
print("adapter", mean_loss(PeftModel.from_pretrained(base, "build/lora/adapter").eval(), rows))
print("merged", mean_loss(AutoModelForCausalLM.from_pretrained("build/lora/merged").eval(), rows))
"""


def run(directory: Path, *command: str) -> str:
    """Runs a command in ``directory`` and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_gives_one_loss_in_three_processes(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, "-c", QUICKSTART)
    run(tmp_path, COMMAND, "fit", "--config", CONFIG)
    judged = run(tmp_path, COMMAND, "validate", "--config", CONFIG, "--ckpt_path=build/lora/last.ckpt")
    found = re.search(r"val/loss\W+([0-9.]+)", judged)
    assert found is not None, judged
    trainers = float(found[1])
    run(tmp_path, COMMAND, "export", "build/lora/last.ckpt", "build/lora/merged", "--merge=true")
    run(tmp_path, sys.executable, "-c", ROWS, CONFIG)
    lines = run(tmp_path, sys.executable, "-c", JUDGE).splitlines()
    losses = {name: float(loss) for name, loss in (line.split() for line in lines)}
    assert losses["adapter"] == pytest.approx(trainers, abs=TOLERANCE)
    assert losses["merged"] == pytest.approx(trainers, abs=TOLERANCE)
    assert abs(losses["base"] - trainers) > 100 * TOLERANCE
