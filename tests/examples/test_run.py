"""Every example runs as it is, in the folder that the quickstart leaves, for a few steps on two processes."""

import json
import os
import shutil
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from lightning_automodel.cli import main
from lightning_automodel.testing.pool import Pool
from tests.examples.conftest import ROOT
from tests.support import cuda_on_cpu
from tests.support.marks import with_long

EXAMPLES = ROOT / "examples"
CONFIGS = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem not in ("quickstart", "vision"))
SOME = {"chat": ["chat"], "megatron_fsdp": ["megatron_fsdp"]}
SOME["others"] = [name for name in CONFIGS if name not in SOME]
SECONDS = 600
pytestmark = pytest.mark.timeout(SECONDS)
LOOPS = ("dpo", "distillation", "reward")


def fit(names: list[str], workspace: Path) -> None:
    """Runs on each rank."""
    os.chdir(workspace)
    for name in names:
        more = []
        if name == "megatron_fsdp":
            cuda_on_cpu.install()
            more = ["--trainer.accelerator=cpu"]
        main(["fit", f"--config=examples/{name}.yaml", "--trainer.max_steps=2", *more])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")
@pytest.mark.parametrize("some", with_long(SOME, "others", "megatron_fsdp"))
def test_configs_train(pool2: Pool, workspace: Path, some: str) -> None:
    pool2.run(fit, SOME[some], workspace, trainer=True, timeout=SECONDS)
    for name in SOME[some]:
        written = "adapter" if name == "lora" else "export"
        assert list((workspace / "build" / name / written).glob("*.safetensors")), name


def run_modules(workspace: Path) -> list[float]:
    """Runs on each rank."""
    os.chdir(workspace)
    for name in LOOPS:
        import_module(f"examples.{name}").main(max_steps=2)
    return import_module("examples.fabric").main(steps=6)


@pytest.mark.long
def test_modules_and_loops_of_ones_own_train(pool2: Pool, workspace: Path) -> None:
    losses, others = pool2.run(run_modules, workspace, trainer=True, timeout=SECONDS)
    assert losses == others
    assert losses[-1] < losses[0]
    for name in (*LOOPS, "fabric"):
        assert list((workspace / "build" / name / "export").glob("*.safetensors")), name


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_two_lines_are_for_a_cluster(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    trainer = yaml.safe_load(text)["trainer"]
    assert trainer["devices"] == 2
    marked = [line.partition(":")[0].strip() for line in text.splitlines() if "# cluster: " in line]
    if name not in ("quickstart", "megatron_fsdp"):
        assert marked[:2] == ["accelerator", "devices"]


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_the_notebook_is_one() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(cell.get("outputs") for cell in notebook["cells"])


@pytest.mark.long
def test_the_notebook_runs_in_a_kernel(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(workspace)}})
    client.execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "loss on held-out text" in printed


# ---- launch lines ----------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
export SLURM_NTASKS=2 SLURM_JOB_NAME=run SLURM_JOB_ID=7 SLURM_NODELIST=localhost SLURM_NODEID=0
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || exit 1; done
"""


def run(command: list[str], workspace: Path, **more: str) -> str:
    """Runs a command as a user would, with this environment's programs first."""
    path = os.pathsep.join([str(workspace / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path} | more
    done = subprocess.run(command, cwd=workspace, env=environment, text=True, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_launch_line_of_torchrun(workspace: Path) -> None:
    output = run(["examples/torchrun.sh", "examples/ddp.yaml", "--trainer.max_steps=1"], workspace)
    assert "DDPStrategy, 2 ranks" in output or "= 2 ranks" in output


@pytest.mark.long
def test_the_launch_line_of_slurm(workspace: Path) -> None:
    srun = workspace / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    variables = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "ACCELERATOR": "cpu"}
    output = run(["examples/slurm.sh", "examples/ddp.yaml", "--trainer.max_steps=1"], workspace, **variables)
    assert "= 2 ranks" in output


@pytest.mark.parametrize("script", ["slurm.sh", "torchrun.sh"])
def test_a_launch_line_is_shell(script: str) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    subprocess.run([shell, "-n", str(EXAMPLES / script)], check=True)
