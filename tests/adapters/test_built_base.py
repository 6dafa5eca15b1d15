"""A frozen base that ``configure_model`` changes after reading it is in checkpoints, runs that resume, and exports."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_changed_base import whole_of
from tests.adapters.test_configure_model import Adapted, lora
from tests.support.adapted import stored_names
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import VOCABULARY, SaveAfter, batches, make_trainer, rows, tiny_llama

CHANGED = "layers.1.self_attn.q_proj"
Change = Callable[[Any, Path], nn.Module]


def merged(base: Any, directory: Path) -> nn.Module:
    """The case of an adapter on top of another one."""
    return PeftModel.from_pretrained(base, directory / "first").merge_and_unload()


@torch.no_grad()
def scaled(base: Any, _: Path) -> nn.Module:
    base.get_parameter(f"model.{CHANGED}.weight").mul_(0.5)
    return base


def given_data(base: Any, _: Path) -> nn.Module:
    weight = base.get_parameter(f"model.{CHANGED}.weight")
    weight.data = weight.data * 0.5
    return base


def replaced(base: Any, _: Path) -> nn.Module:
    layer = base.get_submodule(f"model.{CHANGED}")
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    return base


@torch.no_grad()
def in_other_order(base: Any, _: Path) -> nn.Module:
    weight = base.get_parameter(f"model.{CHANGED}.weight")
    weight.copy_(weight.flip(0).clone())
    return base


def grown(base: Any, _: Path) -> nn.Module:
    base.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    return base


def cast(base: Any, _: Path) -> nn.Module:
    """Values stay what they are."""
    return base.double().float()


CHANGES: dict[Change, set[str]] = {
    merged: {CHANGED},
    scaled: {CHANGED},
    given_data: {CHANGED},
    replaced: {CHANGED},
    in_other_order: {CHANGED},
    grown: {"embed_tokens", "lm_head"},
    cast: set(),
}


ALL, LAYOUTS_OF_TWO = tuple(CHANGES), ("ddp-2", "megatron3-dp2", "megatron3-tp2", "fsdp2-dp2")
QUICK = [("ddp-2", (merged, grown, cast)), ("megatron3-dp2", (scaled,)), ("fsdp2-dp2", (replaced,))]
CASES = [*QUICK, *((layout, ALL) for layout in LAYOUTS_OF_TWO)]


def adapt(base: Any, change: Change, directory: Path) -> nn.Module:
    changed = change(base, directory)
    torch.manual_seed(5)
    return lora(changed, target_modules=["q_proj", "down_proj"])


def run(layout: str, change: Change, directory: Path) -> dict[str, Any]:
    """Runs on each rank: the names in a checkpoint, what an unbroken and a resumed run end with, and logits."""
    chosen, path = LAYOUTS[layout], directory / f"{change.__name__}.ckpt"
    adapted = partial(adapt, change=change, directory=directory)
    unbroken, resumed = (Adapted(directory / "base", adapted, keeps_gradients=False) for _ in range(2))
    for seed, module, begins_from in ((1, unbroken, None), (2, resumed, path)):  # the seed is of more tokens
        torch.manual_seed(seed)
        trainer = make_trainer(chosen.make(), max_steps=3, callbacks=[] if begins_from else [SaveAfter(path, 2)])
        trainer.fit(module, batches(chosen.data_size), ckpt_path=begins_from)
    trainer.save_checkpoint(directory / f"{change.__name__}.last.ckpt")
    with torch.no_grad():
        logits = unbroken.model.eval()(input_ids=rows(2)).logits
    held = {name for name in stored_names(path) if "lora_" not in name}
    return {"held": held, "unbroken": whole_of(unbroken), "resumed": whole_of(resumed), "logits": logits}


def run_all(layout: str, changes: Sequence[Change], directory: Path) -> list[dict[str, Any]]:
    """Runs on each rank."""
    return [run(layout, change, directory) for change in changes]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "changes"), with_long(CASES, *CASES[3:]))
def test_what_is_changed_is_saved(layout: str, changes: Sequence[Change], tmp_path: Path, pool2: Pool) -> None:
    base = tiny_llama(tied=False)
    base.save_pretrained(tmp_path / "base")
    lora(base, target_modules=f".*{CHANGED}", init_lora_weights=False).save_pretrained(tmp_path / "first")
    results = pool2.run(run_all, layout, changes, tmp_path, trainer=True)[0]
    for change, found in zip(changes, results, strict=True):
        assert {_short(name) for name in found["held"]} == CHANGES[change], (change.__name__, found["held"])
        for name, value in found["unbroken"].items():
            torch.testing.assert_close(found["resumed"][name], value, rtol=1e-5, atol=1e-6)
        out = tmp_path / f"{change.__name__}.out"
        export(str(tmp_path / f"{change.__name__}.last.ckpt"), str(out), merge=True)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(out).eval()(input_ids=rows(2)).logits
        torch.testing.assert_close(logits, found["logits"], rtol=1e-5, atol=1e-5)


def _short(name: str) -> str:
    return name.split(".model.")[-1].removeprefix("model.").removesuffix(".weight").removesuffix(".base_layer")
