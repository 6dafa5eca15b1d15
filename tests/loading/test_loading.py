"""Weights reach their owner: from files by slices, at random whole and sliced, tied as they should be."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.loading import initialize, materialize, sharded_loading
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.support.families import tiny_config
from tests.support.initialization import initial_difference

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=131,
    use_cache=False,
)
CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


def write(directory: Path, tied: bool, dtype: torch.dtype = torch.float32, shards: str = "5GB") -> nn.Module:
    """Rank 0 saves a model; every rank returns it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, max_shard_size=shards)
    dist.barrier()
    return model


def differences(actual: nn.Module, expected: nn.Module) -> list[str]:
    """Names of parameters and buffers whose values differ, in any bit."""
    values = {name: value.detach() for name, value in [*expected.named_parameters(), *expected.named_buffers()]}
    found = {name: value.detach() for name, value in [*actual.named_parameters(), *actual.named_buffers()]}
    assert found.keys() == values.keys()
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found.items()}
    return [name for name, value in values.items() if not torch.equal(whole[name].to(value.dtype), value)]


def loaded(tied: bool, sizes: dict[str, int], directory: Path) -> list[str]:
    expected = write(directory, tied, shards="100KB")  # several files
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        model = AutoModelForCausalLM.from_pretrained(directory)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return differences(model, expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}], ids=str)
def test_every_rank_reads_the_values_of_the_files(tied: bool, sizes: dict[str, int], pool4: Pool) -> None:
    assert pool4.run(loaded, tied, sizes, with_directory=True) == [[]] * 4


def loaded_experts(directory: Path) -> list[str]:
    """Fused in memory and apart in files; three of them, which no axis divides."""
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=3))
    if dist.get_rank() == 0:
        expected.save_pretrained(directory)
    dist.barrier()
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        return differences(AutoModelForCausalLM.from_pretrained(directory), expected)


def test_experts_that_lie_apart_in_files(pool4: Pool) -> None:
    assert pool4.run(loaded_experts, with_directory=True) == [[]] * 4


def loaded_unevenly(directory: Path) -> list[str]:
    """Vocabulary 61: tp cuts it into 31 and 30 rows, and dp_shard=3 cuts these into 11, 11, 9 and 10, 10, 10."""
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": 61}))
    if dist.get_rank() == 0:
        expected.save_pretrained(directory)
    dist.barrier()
    mesh = build_mesh(resolve_sizes(6, tp=2, dp_shard=3), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        model = AutoModelForCausalLM.from_pretrained(directory)
    # torch's own full_tensor() misplaces rows here; gather_on_rank_zero is what exports use.
    whole = {name: gather_on_rank_zero(p) for name, p in model.named_parameters()}
    if dist.get_rank():
        return []
    return [name for name, p in expected.named_parameters() if not torch.equal(whole[name], p)]


def test_a_vocabulary_that_no_axis_divides(nursery: Nursery) -> None:
    assert Pool(nursery, 6).run(loaded_unevenly, with_directory=True) == [[]] * 6


def stored_dtypes(directory: Path) -> dict[str, torch.dtype]:
    write(directory, True, torch.bfloat16)
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh, param_dtype=torch.float32), CPU):
        wide = AutoModelForCausalLM.from_pretrained(directory)
    with sharded_loading(lambda model: parallelize(model, mesh, param_dtype=torch.bfloat16), CPU):
        narrow = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {
        "wide": wide.lm_head.weight.dtype,
        "narrow": narrow.lm_head.weight.dtype,
        "buffer": narrow.model.rotary_emb.inv_freq.dtype,
    }


def digits(wide: torch.dtype, sizes: dict[str, int], directory: Path, tied_as: str = EMBEDDING) -> list[str]:
    """Names of parameters that do not have the values of a model that was read in bfloat16 and cast."""
    write(directory, True, wide)
    if tied_as != EMBEDDING and dist.get_rank() == 0:
        weights = load_file(directory / "model.safetensors")
        weights[tied_as] = weights.pop(EMBEDDING)
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
    dist.barrier()
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float()
    mesh = build_mesh(resolve_sizes(2, **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh, param_dtype=torch.float32), CPU):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    whole = {name: gather_on_rank_zero(p) for name, p in model.named_parameters()}
    if dist.get_rank():
        return []
    return [name for name, p in expected.named_parameters() if not torch.equal(whole[name], p)]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_values_have_the_digits_that_were_asked_for(pool2: Pool, wide: torch.dtype, sizes: dict[str, int]) -> None:
    assert pool2.run(digits, wide, sizes, with_directory=True) == [[], []]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_digits_of_a_tied_weight_that_files_have_under_its_other_name(pool2: Pool, sizes: dict[str, int]) -> None:
    assert pool2.run(digits, torch.float32, sizes, tied_as="lm_head.weight", with_directory=True) == [[], []]


def test_precision_decides_the_dtype_of_parameters_and_leaves_buffers(pool2: Pool) -> None:
    for dtypes in pool2.run(stored_dtypes, with_directory=True):
        assert dtypes == {"wide": torch.float32, "narrow": torch.bfloat16, "buffer": torch.float32}


def missing_head(sizes: dict[str, int], directory: Path) -> tuple[torch.Tensor, list[str]]:
    expected = write(directory, True)
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    torch.manual_seed(dist.get_rank())  # rank 0's draw counts
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
    return model.score.weight.full_tensor().detach(), differences(model.model, expected.model)


def test_missing_weights_are_drawn_once_for_every_mesh(pool2: Pool) -> None:
    heads = []
    for sizes in ({"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}):
        for head, body in pool2.run(missing_head, sizes, with_directory=True):
            assert body == []
            heads.append(head)
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert 0.01 < heads[0].std() < 0.03  # the initializer range of the config is 0.02


def materialized(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    parallelize(model, mesh)
    materialize(model, CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()} | dict(
        model.named_buffers()
    )


def test_a_meta_model_gets_the_initial_weights_of_its_author(pool2: Pool) -> None:
    results = [result for sizes in ({"tp": 2}, {"dp_shard": 2}) for result in pool2.run(materialized, sizes)]
    for result in results:
        assert all(torch.equal(value, results[0][name]) for name, value in result.items())
    assert 0.019 < results[0]["model.embed_tokens.weight"].std() < 0.021
    assert torch.equal(results[0]["model.norm.weight"], torch.ones(SIZES["hidden_size"]))
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert torch.equal(results[0]["model.rotary_emb.inv_freq"], plain.model.rotary_emb.inv_freq)


def largest_sum_of_whole_and_sliced() -> tuple[int, int]:
    """Runs on each rank: the most bytes that lie there while drawn weights are sliced, and those of the whole model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    parallelize(model, build_mesh(resolve_sizes(1), "cpu"))
    drawn: list[nn.Parameter] = []
    sliced, held = [0], []

    def slice_and_note(value: nn.Parameter, *rest: Any) -> nn.Parameter:
        drawn.extend(() if drawn else model.parameters())  # plain and whole until all are sliced
        sliced[0] += value.nbytes
        held.append(sliced[0] + sum(p.untyped_storage().nbytes() for p in drawn))
        return original(value, *rest)

    original, initialize._slice_like = initialize._slice_like, slice_and_note
    materialize(model, CPU)
    return max(held), sliced[0]


def test_drawn_weights_lie_there_once(nursery: Nursery) -> None:
    ((held, whole),) = Pool(nursery, 1).run(largest_sum_of_whole_and_sliced)
    assert held < 1.5 * whole


def contradicting_tie(directory: Path) -> None:
    model = write(directory, False)
    if dist.get_rank() == 0:
        model.config.tie_word_embeddings = True
        model.config.save_pretrained(directory)
    dist.barrier()
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        AutoModelForCausalLM.from_pretrained(directory)


def test_a_checkpoint_that_contradicts_its_ties_is_refused(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="tie_word_embeddings=False"):
        pool2.run(contradicting_tie, with_directory=True)


def no_plan() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("reformer"))
    parallelize(model, build_mesh(resolve_sizes(2, tp=2), "cpu"))


def odd_experts() -> None:
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    parallelize(AutoModelForCausalLM.from_config(tiny_config("mixtral", intermediate_size=65)), mesh)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_plan, "ReformerModelWithLMHead publishes no tensor-parallel plan"),
        (odd_experts, "width of each of the 2 matrices in .*gate_up_proj=65: .*use one of 1"),
    ],
)
def test_a_model_that_tp_does_not_fit_is_refused_on_every_rank(function: Any, message: str, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=message) as error:
        pool2.run(function, grace=30)
    assert set(error.value.failures) == {0, 1}


# ---- what initialization leaves --------------------------------------------------------------------------------------


def test_what_only_the_constructor_sets_has_its_value(pool2: Pool) -> None:
    for difference, name in pool2.run(initial_difference, "apertus"):
        assert difference == 0, name


class Forgetful(LlamaForCausalLM):
    """Has a parameter that neither its constructor nor its initialization gives a value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(2))


def forgetful() -> None:
    """Runs on each rank."""
    with torch.device("meta"):
        model = Forgetful(LlamaConfig(**SIZES))
    parallelize(model, build_mesh(resolve_sizes(2, tp=2), "cpu"))
    materialize(model, CPU)


def test_a_parameter_that_nothing_sets_is_named(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="leaves scale: one process would train on memory that nobody has written"):
        pool2.run(forgetful)


class Tabled(LlamaForCausalLM):
    """Computes tables in its constructor, as code of the hub does, that no file holds and no initialization sets."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("places", torch.arange(7), persistent=False)


def tables(sizes: dict[str, int], directory: Path) -> tuple[list[float], list[int]]:
    """Runs on each rank, in memory that earlier tensors have left."""
    write(directory, False)
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), CPU):
        model = Tabled.from_pretrained(directory)
    return model.slopes.tolist(), model.places.tolist()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_tables_that_no_file_holds_are_those_of_the_constructor(sizes: dict[str, int], pool2: Pool) -> None:
    found = pool2.run(tables, sizes, with_directory=True)
    assert found == [([0.5, 0.25, 0.125, 0.0625], list(range(7)))] * 2
