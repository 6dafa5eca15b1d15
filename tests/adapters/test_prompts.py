"""Prompts of peft, which lie beside the model: exact in a loop and under strategies, or named in an error."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lightning_automodel import parallelize
from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import VOCABULARY, SaveAfter, batches, make_trainer, tiny_llama, whole

PROMPT: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
CONFIGS = {
    "prefix": peft.PrefixTuningConfig(**PROMPT),
    "prompt": peft.PromptTuningConfig(**PROMPT),
    "encoder": peft.PromptEncoderConfig(**PROMPT),
    "cartridge": peft.CartridgeConfig(**PROMPT),
    "tasks": peft.MultitaskPromptTuningConfig(**PROMPT, num_tasks=2, num_ranks=1),
    "cpt": peft.CPTConfig(
        cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4], task_type="CAUSAL_LM"
    ),
}


def prompted(method: str, is_read: bool = False) -> Any:
    """Wrap the tiny model; ``is_read``: peft reads the table as it stands, as after ``PeftModel.from_pretrained``."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_llama(tied=False), copy.deepcopy(CONFIGS[method])).train()
    model.peft_config["default"].inference_mode = is_read
    return model


def rows(method: str) -> dict[str, Tensor]:
    return inputs(method, torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1)))


def inputs(method: str, ids: Tensor) -> dict[str, Tensor]:
    tasks = {"task_ids": ids[:, 0] % 2} if method == "tasks" else {}
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **tasks}


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of two steps of gradient descent."""
    found = {}
    for step in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {step}"] = whole(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=0.5)
    return found


def error(method: str, sizes: dict[str, int], is_read: bool) -> float:
    """Runs on each rank: the largest of a gradient."""
    expected = gradients(prompted(method, is_read), rows(method))
    model = parallelize(prompted(method, is_read), build_mesh(resolve_sizes(2, **sizes), "cpu"))
    own = {name: value.chunk(2)[dist.get_rank()] for name, value in rows(method).items()}
    actual = gradients(model, own if "dp_shard" in sizes else rows(method))
    assert actual.keys() == expected.keys()
    assert expected
    return max(float((actual[name] - g).norm() / g.norm().clamp(min=1e-6)) for name, g in expected.items())


def errors(methods: list[str], sizes: dict[str, int], is_read: bool = False) -> dict[str, float]:
    """Runs on each rank."""
    return {method: error(method, sizes, is_read) for method in methods}


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_prompts_are_exact_in_a_loop(sizes: dict[str, int], pool2: Pool) -> None:
    methods = ["prompt", "encoder", "tasks"] + ["prefix"] * ("tp" not in sizes)
    for found in pool2.run(errors, methods, sizes):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_prompts_that_peft_reads_as_they_stand_are_exact(sizes: dict[str, int], pool2: Pool) -> None:
    methods = ["prompt", "encoder", "tasks"] + ["prefix", "cartridge"] * ("tp" not in sizes)
    for found in pool2.run(errors, methods, sizes, is_read=True):
        assert max(found.values()) < 1e-5, found


def beside_reference(sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    """Runs on each rank: losses with a prompt, without it, and with it again, on the mesh and on one process."""
    found = []
    for model in (prompted("prompt"), parallelize(prompted("prompt"), build_mesh(resolve_sizes(2, **sizes), "cpu"))):
        losses = [model(**rows("prompt")).loss]
        with torch.no_grad(), model.disable_adapter():
            losses.append(model(**rows("prompt")).loss)
        losses.append(model(**rows("prompt")).loss)
        sum(losses).backward()
        gradient = next(p.grad for p in model.prompt_encoder.parameters())
        found.append([*(float(loss.detach()) for loss in losses), float(whole(gradient).norm())])
    return found[0], found[1]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_the_model_without_its_prompt_is_a_reference(sizes: dict[str, int], pool2: Pool) -> None:
    for expected, actual in pool2.run(beside_reference, sizes):
        assert actual == pytest.approx(expected, rel=1e-5)


def answers(sizes: dict[str, int], use_cache: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Runs on each rank: answers of other lengths than the other rank's, on one process and on the mesh."""
    found = []
    for model in (prompted("encoder"), parallelize(prompted("encoder"), build_mesh(resolve_sizes(2, **sizes), "cpu"))):
        model.base_model.config.use_cache = model.base_model.generation_config.use_cache = use_cache
        asked = {"input_ids": rows("encoder")["input_ids"][:2], "do_sample": False, "use_cache": use_cache}
        rank = dist.get_rank() if "dp_shard" in sizes else 0
        found.append([model.eval().generate(**asked, max_new_tokens=3 + 3 * rank + more) for more in range(2)])
    return found[0], found[1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_behind_a_prompt_ends_where_each_rank_ends(use_cache: bool, pool2: Pool) -> None:
    for expected, actual in pool2.run(answers, {"dp_shard": 2}, use_cache):
        assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def refusals(sizes: dict[str, int], methods: list[str]) -> dict[str, str]:
    """Runs on each rank."""
    found = {}
    for method in methods:
        with pytest.raises(ValueError, match="of peft") as refusal:
            parallelize(prompted(method), build_mesh(resolve_sizes(2, **sizes), "cpu"))
        found[method] = str(refusal.value)
    return found


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_prompt_that_its_pass_writes_is_named(sizes: dict[str, int], pool2: Pool) -> None:
    for found in pool2.run(refusals, sizes, ["cpt"]):
        assert found["cpt"].startswith("CPTConfig of peft: its forward pass writes into the weight that it trains")
        assert "use LoRA, or DDPStrategy" in found["cpt"]


def test_prefixes_of_split_heads_are_named(pool2: Pool) -> None:
    for found in pool2.run(refusals, {"tp": 2}, ["prefix"]):
        assert "with tp=2: it gives each layer keys and values of whole heads" in found["prefix"]


# ---- under strategies ------------------------------------------------------------------------------------------------


class Prompted(Noted):
    """Trains a prompt, and says what it says to prompts of a user's."""

    def __init__(self, method: str, keeps_gradients: bool = True) -> None:
        super().__init__()
        self.method, self.keeps_gradients, self.said = method, keeps_gradients, ""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = prompted(self.method)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(**inputs(self.method, batch[0])).loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        given = {"task_ids": batch[0][:, 0] % 2} if self.method == "tasks" else {}
        said = self.model.generate(input_ids=batch[0], max_new_tokens=4, do_sample=False, **given)
        self.said += str(sorted(self.all_gather(said).flatten(0, -2).tolist()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.keeps_gradients:
            super().on_before_optimizer_step(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def trained(layout: str, method: str, path: Path, resume: Path | None = None) -> dict[str, Any]:
    """Runs on each rank: steps with accumulation, a save between two micro-batches, and an evaluation."""
    is_megatron = layout.startswith("megatron")  # which shows no gradients there, and goes on behind steps only
    chosen, module = LAYOUTS[layout], Prompted(method, keeps_gradients=not is_megatron)
    saver = [] if resume or is_megatron else [SaveAfter(path / "mid.ckpt", 3)]
    arguments: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer = make_trainer(chosen.make(), callbacks=[*saver, HuggingFaceExport(str(path / layout))], **arguments)
    trainer.fit(module, batches(chosen.data_size), ckpt_path=resume)
    if method not in ("prefix", "tasks"):  # peft's own generation of these is none
        trainer.validate(module, batches(chosen.data_size), verbose=False)
    return {"losses": module.losses, "gradients": module.gradients, "said": module.said}


def written(path: Path) -> dict[str, Tensor]:
    return load_file(path / "adapter_model.safetensors")


def compare(pool: Pool, one: Pool, layout: str, method: str, path: Path) -> None:
    expected = one.run(trained, "ddp-1", method, path, trainer=True)[0]
    (path / "mid.ckpt").rename(path / "one.ckpt")
    for resume in [None] if layout.startswith("megatron") else [None, path / "one.ckpt"]:
        for found in pool.run(trained, layout, method, path, resume, trainer=True):
            later = len(expected["losses"]) - len(found["losses"])
            assert found["losses"] == pytest.approx(expected["losses"][later:], rel=1e-5)
            assert found["said"] == expected["said"]
            for one_process, many in zip(expected["gradients"][::-1], found["gradients"][::-1], strict=False):
                check_gradients(one_process, many)
        for name, value in written(path / "ddp-1").items():
            torch.testing.assert_close(written(path / layout)[name], value, rtol=1e-4, atol=1e-5)


CASES = [
    *((layout, method) for layout in ("fsdp2-dp2", "fsdp2-tp2") for method in ("prompt", "encoder", "tasks")),
    ("fsdp2-dp2", "prefix"),
    *((layout, "encoder") for layout in ("fsdp2-cp2", "megatron3-dp2", "megatron3-tp2")),
    *(("megatron3-dp2", method) for method in ("prompt", "prefix")),
]
FAST = [("fsdp2-tp2", "encoder"), ("fsdp2-dp2", "tasks"), ("megatron3-dp2", "encoder")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "method"), with_long(CASES, *(case for case in CASES if case not in FAST)))
def test_prompts_train_beside_models_that_are_sharded(
    layout: str, method: str, nursery: Nursery, pool2: Pool, tmp_path: Path
) -> None:
    compare(pool2, Pool(nursery, 1), layout, method, tmp_path)


class Saved(Prompted):
    """Evaluates a prompt that ``PeftModel.from_pretrained`` read."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = peft.PeftModel.from_pretrained(tiny_llama(tied=False), self.method)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(float(self.trainer.strategy.reduce(self.model(input_ids=batch[0], labels=batch[0]).loss)))
        said = self.model.generate(input_ids=batch[0], max_new_tokens=4, do_sample=False)
        self.said += str(sorted(self.all_gather(said).flatten(0, -2).tolist()))


def evaluated(layout: str, path: Path) -> tuple[list[float], str]:
    """Runs on each rank."""
    module = Saved(str(path))
    make_trainer(LAYOUTS[layout].make()).validate(module, batches(LAYOUTS[layout].data_size), verbose=False)
    return module.losses, module.said


def test_prompts_from_files_are_evaluated(pool2: Pool, nursery: Nursery, tmp_path: Path) -> None:
    prompted("encoder").save_pretrained(tmp_path)
    [(losses, said)] = Pool(nursery, 1).run(evaluated, "ddp-1", tmp_path, trainer=True)
    for layout in ("fsdp2-dp2", "fsdp2-tp2", "megatron3-dp2"):
        for found in pool2.run(evaluated, layout, tmp_path, trainer=True):
            assert found == (pytest.approx(losses, rel=1e-5), said)


def refusals_of_strategies(methods: list[str]) -> dict[str, str]:
    """Runs on each rank."""
    found = {}
    for method in methods:
        with pytest.raises(ValueError, match="of peft") as refusal:
            make_trainer({"tp": 2}, max_steps=1).fit(Prompted(method), batches(1))
        found[method] = str(refusal.value)
    return found


def test_what_stands_before_keys_of_split_heads_is_named(pool2: Pool) -> None:
    for found in pool2.run(refusals_of_strategies, ["prefix", "cpt"], trainer=True):
        assert "keys and values of whole heads, of which a rank has some" in found["prefix"]
        assert "its forward pass writes into the weight that it trains" in found["cpt"]
