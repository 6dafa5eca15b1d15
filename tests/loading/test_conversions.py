"""Weights that transformers converts on the way from files to parameters, and what it initializes beside them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, initialization
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from lightning_automodel.loading import sharded_loading
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.families import causal_families, image_text_families, tiny_model
from tests.support.files import Files
from tests.support.weights import all_read, randomized, unequal, weights

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    use_cache=False,
)


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["hrm_text", "hy_v4"], id="a fused matrix, and values that initialization asks for"),
        pytest.param(["kimi_linear", "olmo_hybrid"], id="convolutions"),
        pytest.param(["inkling2_text", "qwen2_5_vl"], id="interleaved experts, and a tower"),
        pytest.param(["blip"], id="data that initialization gives"),
    ],
)
def test_converted_weights_are_those_of_the_files(families: list[str], pool2: Pool) -> None:
    assert pool2.run(all_read, families, with_directory=True) == [[]] * 2


# ---- conversions that do more than move elements ---------------------------------------------------------------------


class Scaled(ConversionOps):
    """Scales the rows of a weight in place, each by its number in the whole."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **context: Any) -> dict[str, Tensor]:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0].mul_(torch.arange(tensors[0].shape[0])[:, None])}


def converted(directory: Path) -> list[str]:
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        randomized(LlamaForCausalLM(CONFIG)).save_pretrained(directory)
    dist.barrier()

    rule = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Scaled()])
    register_checkpoint_conversion_mapping("llama", [rule], overwrite=True)
    plain = LlamaForCausalLM.from_pretrained(directory)
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        return unequal(LlamaForCausalLM.from_pretrained(directory), plain)


def test_a_conversion_that_calculates_is_done_on_whole_tensors(pool2: Pool) -> None:
    assert pool2.run(converted, with_directory=True) == [[]] * 2


# ---- sizes that differ -----------------------------------------------------------------------------------------------


def trained(directory: Path) -> dict[str, set[str]]:
    """Runs on each rank: names of the parameters that train, of a family that freezes some when it is built."""
    files = Files("idefics", directory / "idefics", partial(tiny_model, "idefics"), None)
    plain = files.plain()
    mesh = build_mesh(resolve_sizes(2, dp_shard=2), "cpu")
    models = {"built": tiny_model("idefics"), "read": plain, "sharded": files.on_mesh(plain, mesh, None)}
    return {key: {n for n, p in model.named_parameters() if p.requires_grad} for key, model in models.items()}


def test_what_trains_is_what_trains_on_one_device(pool2: Pool) -> None:
    for found in pool2.run(trained, with_directory=True):
        assert found["sharded"] == found["read"] > found["built"]


def mismatched(directory: Path) -> None:
    """The file holds as many rows as each rank of the mesh does."""
    if dist.get_rank() == 0:
        model = LlamaForCausalLM(CONFIG)
        model.config.vocab_size = 192
        model.save_pretrained(directory)
    dist.barrier()
    mesh = build_mesh(resolve_sizes(2, dp_shard=2), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        LlamaForCausalLM.from_pretrained(directory)


def test_a_file_as_large_as_a_shard_is_not_taken_for_one(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="ignore_mismatched_sizes") as failed:
        pool2.run(mismatched, with_directory=True, grace=30)
    assert set(failed.value.failures) == {0, 1}


# ---- initialization --------------------------------------------------------------------------------------------------


class Curious(LlamaForCausalLM):
    """Initializes a parameter from the values of another, and writes into a third whether it has values or not."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.summary = nn.Parameter(torch.empty(config.vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Curious):
            initialization.copy_(module.summary, module.lm_head.weight.mean(dim=1))
            template = torch.zeros_like(module.model.norm.weight)
            template[:3] = 1.0
            module.model.layers[0].mlp.down_proj.weight.data[:, 0] = template


def curious(sizes: dict[str, int], directory: Path) -> list[str]:
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        randomized(LlamaForCausalLM(CONFIG)).save_pretrained(directory)
    dist.barrier()
    plain = Curious.from_pretrained(directory)
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        model = Curious.from_pretrained(directory)
    assert all(type(parameter.data) in (DTensor, Tensor) for parameter in model.parameters())
    return unequal(model, plain)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_initialization_sees_the_values_of_one_device(sizes: dict[str, int], pool2: Pool) -> None:
    assert pool2.run(curious, sizes, with_directory=True) == [[]] * 2


# ---- all families ----------------------------------------------------------------------------------------------------

NOT_BY_ONE_PROCESS = {
    "evolla": "AutoModelForImageTextToText does not know its config",
    "fast_vlm": "TimmWrapperModel requires the timm library",
    "gemma3n": "TimmWrapperModel requires the timm library",
    "gemma4_assistant": "its tiny config is refused",
    "gemma4_unified_assistant": "its tiny config is refused",
    "inkling_mm_model": "No module named 'scipy'",
    "musicgen": "its config has no attribute dropout",
    "musicgen_melody": "its config has no attribute dropout",
    "perception_lm": "TimmWrapperModel requires the timm library",
    "shieldgemma2": "from_pretrained misses what save_pretrained has written, under other names",
}
"""Families that transformers itself does not build, or read from files that it wrote, on this machine."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_reads_and_writes_its_weights(world: int, nursery: Nursery) -> None:
    planned = set(causal_families())
    found = {}
    for family in [*planned, *causal_families(with_plan=False), *image_text_families()]:
        found[family] = Pool(nursery, world).run(weights, family, family in planned, with_directory=True, timeout=180)
    wrong = {name: result for name, result in found.items() if any(w.read or w.written for w in result)}
    assert {name: result for name, result in wrong.items() if name not in NOT_BY_ONE_PROCESS} == {}
    assert wrong.keys() == NOT_BY_ONE_PROCESS.keys()
