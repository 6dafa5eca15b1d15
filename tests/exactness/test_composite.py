"""A vision-language model whose tower is frozen, on batches of which only some hold images."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.structure import find_towers
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Batch, Schedule, compare
from tests.support.marks import with_long
from tests.support.run_family import Outcome, Run, probe, run_all
from tests.support.training import Recorder, make_trainer, world_size
from tests.support.training import batches as text

IMAGE, PATCHES = 100, 4


def build() -> nn.Module:
    """A tiny LLaVA with two tower blocks, the tower frozen."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=PATCHES)
    )
    for tower in find_towers(model).values():
        tower.requires_grad_(False)
    return model


def draw(schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Images on the even data ranks only."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    micro = []
    for _ in range(schedule.micro_batches):
        ids = torch.randint(3, IMAGE, (schedule.rows, schedule.length), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if data_rank % 2 == 0:
            ids[:, 1 : 1 + PATCHES] = IMAGE
            batch["pixel_values"] = torch.randn(schedule.rows, 3, 28, 28, generator=generator)
        micro.append(batch)
    return micro


def error(policy: str, sizes: dict[str, int], world: int) -> tuple[float, str]:
    """Runs on each rank."""
    return compare(build, sizes, world, config=FSDP2Config(tower_policy=policy), draw=draw).largest


@pytest.mark.slow
@pytest.mark.parametrize("policy", with_long(["root", "replicate"], "replicate"))
def test_a_batch_without_images_on_some_ranks(policy: str, pool2: Pool, pool4: Pool) -> None:
    for pool, sizes in ((pool2, {"dp_shard": 2}), (pool4, {"dp_shard": 2, "tp": 2})):
        for largest, name in pool.run(error, policy, sizes, pool.world_size):
            assert largest <= 1e-5, name


def adapted() -> nn.Module:
    """Its embedding frozen, and adapters on tower, projector and language model."""
    model: Any = get_peft_model(
        build(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_alpha=1)
    )
    return model.get_base_model()


def error_of_adapters(sizes: dict[str, int]) -> tuple[float, str]:
    """Runs on each rank."""
    return compare(adapted, sizes, dist.get_world_size(), draw=draw).largest


@pytest.mark.long
def test_adapters_on_batches_without_images_on_some_ranks(pool2: Pool, pool4: Pool) -> None:
    for pool, sizes in ((pool2, {"dp_shard": 2}), (pool4, {"dp_shard": 2, "tp": 2})):
        for largest, name in pool.run(error_of_adapters, sizes):
            assert largest <= 1e-5, name


def draw_images(schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """On every data rank, as a tower that is gathered by layer needs it."""
    return draw(schedule, 10 * step + data_rank, 0)


def build_trainable() -> nn.Module:
    """With biases that are not zero, so that none consists of rounding errors after a step."""
    model = build().requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def error_by_layer(sizes: dict[str, int]) -> tuple[float, str]:
    """Runs on each rank."""
    one_unit = {"fsdp2_min_num_params": 10**9, "reshard_after_forward": True}  # its last block's output is not used
    config = FSDP2Config(tower_policy="per_layer", **one_unit)
    return compare(build_trainable, sizes, 2, config=config, draw=draw_images).largest


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=["tp2", "dp2"])
def test_a_tower_that_trains_sharded_by_layer(sizes: dict[str, int], pool2: Pool) -> None:
    for largest, name in pool2.run(error_by_layer, sizes):
        assert largest <= 1e-5, name


def unfreeze(model: nn.Module) -> None:
    for tower in find_towers(model).values():
        tower.requires_grad_(True)


def refusal(early: bool) -> str:
    """Runs on each rank: what is said to a replicated tower that trains, before or after it was made parallel."""
    mesh, model = build_mesh(resolve_sizes(2, dp_shard=2), "cpu"), build()
    try:
        if early:
            unfreeze(model)
        parallelize(model, mesh, FSDP2Config(tower_policy="replicate"))
        unfreeze(model)
        assert not early
        model(**draw_images(Schedule(), 0, 0)[0])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_replicated_tower_must_be_frozen(early: bool, pool2: Pool) -> None:
    for message in pool2.run(refusal, early):
        assert "is for frozen towers, but model.vision_tower (CLIPVisionModel) has parameters that train" in message


class Described(Recorder):
    """Text for the language model, and a frozen tower."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build()


def losses_of_two_calls() -> list[float]:
    """Runs on each rank."""
    module = Described()
    for _ in range(2):
        make_trainer({"config": FSDP2Config(tower_policy="replicate")}, max_steps=1).fit(module, text(world_size()))
    return module.losses


def test_a_replicated_tower_stays_so_in_the_next_call(pool2: Pool) -> None:
    for found in pool2.run(losses_of_two_calls, trainer=True):
        assert len(found) == 2


def without_towers() -> list[Outcome]:
    """Runs on each rank: features are made by plain modules, and images are on some data ranks only."""
    family, schedule = "gemma4_unified", Schedule(steps=1, clip=None)
    runs = {adapter: Run(sizes={"dp_shard": 2}, schedule=schedule, adapter=adapter) for adapter in ("", "all-linear")}
    return list(run_all(family, runs, probe(family).inputs, double=True).values())


@pytest.mark.long
def test_a_family_without_towers(pool2: Pool) -> None:
    for found in pool2.run(without_towers, timeout=240.0):
        for outcome in found:
            assert outcome.failure == ""
            assert outcome.error <= 1e-9, outcome
