"""What is true of one strategy is true of all: the numbers of one process, whatever the strategy."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import (
    FAMILIES,
    UNEVEN,
    Subject,
    data,
    differences,
    gather_part,
    run_everything,
    save_families,
)

BOUND = 1e-5
LONG = [layout for layout in LAYOUTS if layout not in ("ddp-1", "ddp-2", "fsdp2-dp2-tp2")]
"""What the others include; tensor parallelism with Megatron-FSDP is in the chain of checkpoints, too."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_families(tmp_path_factory.mktemp("models"))


def train(layout: str | None, path: Path, directory: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs on each rank: several runs, by name."""
    results = {}
    for name, case in cases.items():
        options = {key: case[key] for key in ("optimizer", "frozen", "recomputed") if key in case}
        module = Subject(path / case["family"], **options)
        chosen = LAYOUTS[layout] if layout else None
        strategy = chosen.make(**case.get("arguments", {})) if chosen else "auto"
        devices, data_size = (chosen.ranks, chosen.data_size) if chosen else (1, 1)
        results[name] = run_everything(module, strategy, devices, data_size, directory / name)
    return results


CASES: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in FAMILIES},
    "qwen3": {"family": "qwen3", "recomputed": True},
    "frozen": {"family": "llama", "frozen": True, "optimizer": "adamw"},
}


@pytest.fixture(scope="module")
def expected(models: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Lightning's own strategy for one device."""
    return Pool(nursery, 1).run(train, None, models, tmp_path_factory.mktemp("one"), CASES, trainer=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(LAYOUTS, *LONG))
def test_everything_equals_one_process(
    layout: str, expected: dict[str, Any], models: Path, nursery: Nursery, tmp_path: Path
) -> None:
    chosen = LAYOUTS[layout]
    ranks = Pool(nursery, chosen.ranks).run(train, layout, models, tmp_path, CASES, trainer=True, timeout=120)
    for name in CASES:
        found = differences(expected[name], [rank[name] for rank in ranks], chosen.data_size)
        assert {kind: error for kind, error in found.items() if not error <= BOUND} == {}, name
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "export")
        for key, value in exported.named_parameters():
            assert value.equal(ranks[0][name]["parameters"][f"model.{key}"]), key


# ---- checkpoints -----------------------------------------------------------------------------------------------------

CHAIN: list[tuple[str, bool]] = [  # each trains one epoch more; a folder, or a plain file
    ("ddp-2", False),
    ("fsdp2-dp2-tp2", True),
    ("megatron3-dp2-tp2", True),
    ("megatron1-dp2", False),
    ("megatron2-dp2", True),
    ("ddp-2", True),
    ("megatron3-tp2", False),
    ("fsdp2-dp2", False),
]
CHAINS = {"three strategies": [*CHAIN[:3], CHAIN[-1]], "all": CHAIN}


def continue_with(layout: str | None, path: Path, directory: Path, epochs: int, **arguments: Any) -> dict[str, Any]:
    """Runs on each rank: one epoch more than the checkpoint of the last link has."""
    chosen = LAYOUTS[layout] if layout else None
    strategy = chosen.make(**arguments) if chosen else "auto"
    devices, data_size = (chosen.ranks, chosen.data_size) if chosen else (1, 1)
    resume = directory / f"{epochs - 1}/epoch={epochs - 2}.ckpt" if chosen and epochs > 1 else None
    module = Subject(path / "llama", "adamw")
    return run_everything(module, strategy, devices, data_size, directory / str(epochs), epochs, resume)


@pytest.mark.slow
@pytest.mark.parametrize("links", with_long(CHAINS, "all"))
def test_checkpoints_go_from_strategy_to_strategy(links: str, models: Path, nursery: Nursery, tmp_path: Path) -> None:
    chain = CHAINS[links]
    count = len(chain)
    one = Pool(nursery, 1).run(continue_with, None, models, tmp_path / "one", count, trainer=True)[0]
    per_epoch = len(one["gradients"]) // count
    for epochs, (layout, folder) in enumerate(chain, start=1):
        chosen = LAYOUTS[layout]
        arguments = {"trainer": True, "timeout": 60, "save_distributed_checkpoint": folder}
        results = Pool(nursery, chosen.ranks).run(continue_with, layout, models, tmp_path, epochs, **arguments)
        steps = slice((epochs - 1) * per_epoch, epochs * per_epoch)
        assert results[0]["rates"] == pytest.approx(one["rates"][steps])
        losses = results[0]["losses"][0]
        expected = one["losses"][(epochs - 1) * len(one["losses"]) // count]
        assert losses == pytest.approx(expected, rel=1e-5), (epochs, layout)
        assert (tmp_path / str(epochs) / f"epoch={epochs - 1}.ckpt").is_dir() == folder
    assert results[0]["parameters"].keys() == one["parameters"].keys()
    for name, value in one["parameters"].items():
        assert (results[0]["parameters"][name] - value).abs().max() < 1e-5, name
    assert results[0]["tested"] == pytest.approx(one["tested"], rel=1e-5)


# ---- models without weights ------------------------------------------------------------------------------------------


class OnMeta(Subject):
    """Its author's initialization draws the weights, after the model was made parallel."""

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.path))


def initialize(layout: str, path: Path) -> dict[str, Any]:
    chosen = LAYOUTS[layout]
    torch.manual_seed(int(os.environ["RANK"]))  # rank 0's draws count
    module = OnMeta(path / "llama")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    run = L.Trainer(accelerator="cpu", devices=chosen.ranks, strategy=chosen.make(), **quiet)
    run.validate(module, data(UNEVEN), verbose=False)
    return {name: gather_part(p) for name, p in module.named_parameters()}


def test_initial_weights_do_not_depend_on_the_strategy(models: Path, nursery: Nursery) -> None:
    expected = Pool(nursery, 1).run(initialize, "ddp-1", models, trainer=True)[0]
    assert expected["model.model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    for layout in ("ddp-2", "megatron3-dp2", "megatron3-tp2"):
        actual = Pool(nursery, LAYOUTS[layout].ranks).run(initialize, layout, models, trainer=True)[0]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert actual[name].equal(value), (layout, name)
