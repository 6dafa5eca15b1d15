"""Activation checkpointing: the same numbers in every mode and layout, what blocks keep to the byte, clear refusals."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import DynamicCache

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.caches import has_cache, without_cache
from lightning_automodel.parallel.activation_checkpointing.blocks import apply_activation_checkpointing
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.exactness.test_composite import build as build_llava
from tests.exactness.test_composite import draw as draw_images
from tests.parallel.levers.support import LENGTH, ROWS, different, gradients, kept_bytes, token_ids
from tests.plans.support import BOUND, build_llama, with_vectors
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

SCHEDULE = Schedule(steps=1, length=12)
MODES: list[Any] = ["full", "selective", "submodule", ["attention", "aten.mm"]]


def shared_keys_and_values() -> nn.Module:
    """The last two layers use the keys and values of the first two; a cache is asked for."""
    model: Any = tiny_model("gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2)
    model.config.use_cache = True
    return model


def llama(**changes: Any) -> nn.Module:
    return tiny_model("llama", attention="sdpa", **changes)


# ---- numbers ---------------------------------------------------------------------------------------------------------

BUILDS = {
    "llama": llama,
    "experts": partial(tiny_model, "mixtral"),
    "biased experts": partial(tiny_model, "gpt_oss"),
    "shared": shared_keys_and_values,
}
CASES: list[tuple[str, Any, dict[str, int], bool]] = [
    ("llama", "full", {"tp": 2}, True),
    ("llama", "submodule", {"tp": 2}, True),
    ("llama", "selective", {"tp": 2}, False),
    ("llama", ["attention", "aten.mm"], {"tp": 2}, False),
    ("experts", "full", {"tp": 2}, True),
    ("experts", "submodule", {"tp": 2}, False),
    ("experts", "selective", {"dp_shard": 2}, False),
    ("biased experts", "selective", {"tp": 2}, False),
    ("shared", "full", {"tp": 2}, False),
    ("shared", "submodule", {"dp_shard": 2}, False),
]


def errors() -> list[tuple[float, str]]:
    """Runs on each rank."""
    found = []
    for build, mode, sizes, cut in CASES:
        config = FSDP2Config(activation_checkpointing=mode, sequence_parallel=cut)
        error, where = compare(BUILDS[build], sizes, 2, SCHEDULE, config).largest
        found.append((error, f"{where} of {build}, {mode}, {sizes}, {cut}"))
    return found


@pytest.mark.slow
def test_numbers_are_those_of_one_process(pool2: Pool) -> None:
    for found in pool2.run(errors):
        assert [where for error, where in found if error > BOUND] == []


def image_errors() -> list[tuple[float, str]]:
    """Runs on each rank: towers are trained, and only some ranks have images."""

    def build() -> nn.Module:
        return with_vectors(build_llava().requires_grad_(True))

    found = []
    for scope in ("vision", ["language", "multimodal"]):
        config = FSDP2Config(activation_checkpointing=True, activation_checkpointing_scope=scope)
        found.append(compare(build, {"dp_shard": 2, "tp": 2}, 4, SCHEDULE, config, draw=draw_images).largest)
    return found


@pytest.mark.slow
def test_towers_and_four_ranks(pool4: Pool) -> None:
    for found in pool4.run(image_errors):
        assert max(found) <= (BOUND, "")


def bits() -> dict[str, list[str]]:
    """Runs on each rank: with dropout, casts and caches, against the same layout without checkpointing."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    whole: Any = llama(attention_dropout=0.2)
    whole.config.use_cache = True

    def make(mode: Any) -> nn.Module:
        model = parallelize(copy.deepcopy(whole), mesh, FSDP2Config(activation_checkpointing=mode), mp_policy=policy)
        return model.train()

    found = {str(mode): different(partial(make, False), partial(make, mode), token_ids()) for mode in MODES}
    names = [name for name, _ in make("submodule").named_parameters()]
    return {**found, "names": [n for n, _ in whole.named_parameters() if n not in names]}


@pytest.mark.slow
def test_casts_and_random_numbers_are_repeated(pool2: Pool) -> None:
    for found in pool2.run(bits):
        assert found == {**{str(mode): [] for mode in MODES}, "names": []}


def test_routes_are_kept() -> None:
    model: Any = tiny_model("mixtral", num_hidden_layers=1).train()
    experts, gate = model.model.layers[0].mlp.experts, model.model.layers[0].mlp.gate
    routes: list[Tensor] = []
    experts.register_forward_pre_hook(lambda _, args: routes.append(args[1].clone()))
    apply_activation_checkpointing(model)
    ids = token_ids()
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        gate.weight.data = -gate.weight  # as if rounding had turned every decision
    loss.backward()
    first, again = routes
    assert torch.equal(first, again)
    model(input_ids=ids)
    assert not torch.equal(first, routes[2])


# ---- memory ----------------------------------------------------------------------------------------------------------

STREAM, HEADS, KV_HEADS, FEED = 96, 4 * 16, 2 * 16, 128  # features per token of the tiny Llama
KEPT = {
    "full": STREAM,  # the output, which is the input of the next block
    "submodule": 4 * STREAM,  # of norm, attention, norm and feed-forward; the first one is the previous block's
    "selective": STREAM + HEADS + 4 + HEADS + KV_HEADS + FEED + STREAM,  # attention; q, v, gate, down
    "attention": STREAM + HEADS + 4,  # with a number per head for its backward pass
    "matmul": STREAM + HEADS + 2 * KV_HEADS + 2 * STREAM + 2 * FEED,
}


def test_bytes_that_a_block_keeps() -> None:
    whole = llama().train()
    found: dict[str, float] = {}
    for name in KEPT:
        model: Any = copy.deepcopy(whole)
        apply_activation_checkpointing(model, [name] if name in ("attention", "matmul") else name)
        found[name] = kept_bytes(model, model.model.layers[0], token_ids()) / (4 * ROWS * LENGTH)
    assert found == KEPT
    model = copy.deepcopy(whole)
    assert kept_bytes(model, model.model.layers[0], token_ids()) / (4 * ROWS * LENGTH) == 1286


def bytes_per_rank() -> dict[str, float]:
    """Runs on each rank: features per token of the whole sequence, as above."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    found = {}
    for mode, cut in (("full", False), ("full", True), ("submodule", True)):
        config = FSDP2Config(activation_checkpointing=mode, sequence_parallel=cut)
        model: Any = parallelize(llama(), mesh, config).train()
        kept = kept_bytes(model, model.model.layers[0], token_ids())
        found[f"{mode} {cut}"] = kept / (4 * ROWS * LENGTH)
    return found


def test_bytes_on_two_ranks(pool2: Pool) -> None:
    # Attention and feed-forward take a gathered stream: to gather it again would be two collectives more.
    expected = {"full False": STREAM, "full True": STREAM / 2, "submodule True": 2 * STREAM + 2 * STREAM / 2}
    for found in pool2.run(bytes_per_rank):
        assert found == expected


def test_a_cache_of_keys_and_values_goes_and_a_table_of_that_name_stays() -> None:
    for name in ("past_key_values", "cache"):  # transformers' name up to 5.23, and from then on
        assert has_cache({name: DynamicCache()})
        assert without_cache({name: DynamicCache(), "use_cache": True}) == {name: None, "use_cache": False}
    for table in (torch.ones(2), (torch.ones(2), torch.ones(2)), {"cos": torch.ones(2)}):
        assert not has_cache({"cache": table})
        assert without_cache({"cache": table})["cache"] is table


@pytest.mark.parametrize("by_config", [True, False])
def test_a_cache_that_a_user_gives_is_refused(by_config: bool) -> None:
    """Blocks would go on as if nothing came before."""
    model: Any = llama().train()
    apply_activation_checkpointing(model, "full" if by_config else False)
    if not by_config:
        model.gradient_checkpointing_enable()
    first, second = token_ids().split(LENGTH // 2, dim=1)
    assert model(first, use_cache=True).logits.requires_grad  # what a config asks for is left out
    model.eval()
    with torch.no_grad():
        read = model(first, use_cache=True).past_key_values
        whole = model(torch.cat([first, second], 1)).logits[:, first.shape[1] :]
        assert torch.allclose(model(second, past_key_values=copy.deepcopy(read)).logits, whole, atol=1e-5)
    model.train()
    for given in (read, DynamicCache()):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM trains with activation .* called with past_key_values"):
            model(second, past_key_values=given)
    model.gradient_checkpointing_disable()
    if not by_config:
        assert torch.allclose(model(second, past_key_values=read).logits, whole, atol=1e-5)


def test_what_waits_on_the_host() -> None:
    whole = llama().train()
    model = copy.deepcopy(whole)
    apply_activation_checkpointing(model, offload=True)
    assert different(lambda: whole, lambda: model, token_ids()) == []


def refused_on_cpu() -> None:
    mesh = build_mesh(resolve_sizes(1), "cpu")
    parallelize(llama(), mesh, FSDP2Config(activation_checkpointing=True, activation_offload=True))


def test_host_memory_is_all_there_is_on_cpu(nursery: Nursery) -> None:
    with pytest.raises(RankFailed, match="on CPU activations are in host memory already"):
        Pool(nursery, 1).run(refused_on_cpu)


# ---- which modules ---------------------------------------------------------------------------------------------------


def test_scopes() -> None:
    def wrapped(scope: Any) -> set[str]:
        model = build_llava()
        apply_activation_checkpointing(model, True, scope)
        return {
            name.rpartition(".")[0]
            for name, module in model.named_modules()
            if "_checkpointed_by_config" in vars(module)
        }

    tower, text = "model.vision_tower.encoder.layers", "model.language_model.layers"
    assert wrapped("vision") == wrapped("multimodal") == {tower}
    assert wrapped("language") == {text}
    assert wrapped("all") == wrapped(["language", "vision"]) == {tower, text}
    with pytest.raises(
        ValueError, match=r"'audio' finds nothing .* LlavaForCond\w+: it has blocks of language, vision"
    ):
        wrapped("audio")
    with pytest.raises(ValueError, match="Linear: it has no repeated blocks"):
        apply_activation_checkpointing(nn.Linear(2, 2))


ASKED: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("before", {}, {"tp": 2}),
    ("after", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"tp": 2}),
    ("after", {"every_n_layers": 2}, {"dp_shard": 2}),
    ("between", {}, {"tp": 2}),
]


def by_transformers(when: str, options: dict[str, Any], sizes: dict[str, int], cut: bool = False) -> tuple[float, str]:
    """Runs on each rank: a user calls transformers' own switch."""

    def make(model: Any, mesh: Any) -> nn.Module:
        if when == "before":
            model.gradient_checkpointing_enable(**options)
        parallelize(model, mesh, FSDP2Config(sequence_parallel=cut))
        model.train()
        if when == "between":
            model.gradient_checkpointing_enable()
            model.gradient_checkpointing_disable()
            assert width_kept(model) > 2 * STREAM
        if when != "before":
            model.gradient_checkpointing_enable(**options)
        assert model.is_gradient_checkpointing
        assert width_kept(model) == model.config.hidden_size / (2 if cut else 1)
        return model

    return compare(build_llama, sizes, 2, SCHEDULE, make_parallel=make).largest


def width_kept(model: Any) -> float:
    """Features per token that the first layer keeps."""
    kept = kept_bytes(model, model.model.layers[0], token_ids()) / (4 * ROWS * LENGTH)
    model.zero_grad()
    return kept


def all_by_transformers() -> list[tuple[float, str]]:
    return [by_transformers(*case) for case in ASKED] + [by_transformers("after", {}, {"tp": 2}, cut=True)]


@pytest.mark.slow
def test_gradient_checkpointing_enable(pool2: Pool) -> None:
    for found in pool2.run(all_by_transformers):
        assert [(error, where) for error, where in found if error > BOUND] == []


def test_switches_of_transformers_with_a_mode_of_ours() -> None:
    model: Any = tiny_model("mixtral").train()
    apply_activation_checkpointing(model, "submodule")
    kept = width_kept(model)
    model.gradient_checkpointing_enable()
    assert width_kept(model) == kept  # the mode stays, and nothing is computed twice
    seen: list[str] = []

    def contexts() -> tuple[Any, Any]:
        seen.append("made")
        return nullcontext(), nullcontext()

    model = tiny_model("mixtral").train()
    expected = gradients(copy.deepcopy(model), token_ids(), steps=2)
    apply_activation_checkpointing(model, False)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    found = gradients(model, token_ids(), steps=2)
    assert seen == ["made"] * 4
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    for _ in range(2):  # a graph that is kept is computed again each time
        loss.backward(retain_graph=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_checkpointing": "half"}, "'half' is not one of full, selective, submodule"),
        ({"activation_checkpointing": ["aten.nothing"]}, "'aten.nothing', which is no operation"),
        ({"activation_checkpointing_scope": "vision"}, "scope does nothing without"),
        ({"activation_checkpointing": True, "activation_checkpointing_scope": ["text"]}, "'text' is not one of all"),
        ({"activation_offload": True}, "offload does nothing without"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP2Config(**fields)
