"""Compiled blocks: numbers and names of uncompiled ones, one graph for blocks that are alike, nothing outside of it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils, modeling_flash_attention_utils

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.activation_checkpointing.blocks import apply_activation_checkpointing
from lightning_automodel.parallel.compile import apply_compile, assume_no_packing
from lightning_automodel.parallelizer import apply_selective_activation_checkpointing, parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.support import gradients, token_ids
from tests.support.families import tiny_model
from tests.support.marks import with_long

EAGER = "aot_eager"  # traces and differentiates as the default does, and generates no code
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}

PASSES = 2  # over the logits of the loss

# family, changes of its config, levers, and graphs: of the last case's blocks none, since torch cannot hand out what is
# recorded
CASES: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("llama", {}, {"activation_checkpointing": "full"}, 1 + PASSES),
    ("mixtral", {"output_router_logits": True}, {"sequence_parallel": True}, 1 + PASSES),
    ("mixtral", {"output_router_logits": True}, {"activation_checkpointing": "full"}, PASSES),
]
ALONE: list[tuple[str, dict[str, Any], Any, int]] = [
    ("qwen3", {}, "asked", 1),  # by transformers' own switch, afterwards
    ("gemma3_text", BOTH_KINDS, "selective", 2),
    ("mixtral", {}, "submodule", 1),
]


def compiled_runs(case: int) -> dict[str, Any]:
    """Runs on each rank."""
    torch._dynamo.reset()
    family, changes, levers, _ = CASES[case]
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    model: Any = tiny_model(family, attention="sdpa", **changes).train()
    plain = parallelize(copy.deepcopy(model), mesh, FSDP2Config(**levers))
    names = [name for name, _ in model.named_parameters()]
    parallelize(model, mesh, FSDP2Config(**levers, enable_compile=True, compile_backend=EAGER))
    assert names == [name for name, _ in model.named_parameters()]
    return differences(plain, model)


def differences(plain: Any, compiled: Any) -> dict[str, Any]:
    compiled.config.use_cache = plain.config.use_cache = True
    counters.clear()
    one, two = (gradients(model, token_ids(), steps=2) for model in (plain, compiled))
    assert one.keys() == two.keys()
    return {
        "error": max(((two[name] - value).norm() / value.norm()).item() for name, value in one.items()),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "generated": torch.equal(*(generated(model) for model in (plain, compiled))),
    }


def generated(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().generate(token_ids(), max_new_tokens=3, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", with_long(range(len(CASES)), 1), ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_on_two_ranks(case: int, pool2: Pool) -> None:
    for found in pool2.run(compiled_runs, case, timeout=100):
        check(found, CASES[case][-1])


@pytest.mark.long
@pytest.mark.parametrize(("family", "changes", "mode", "graphs"), ALONE)
def test_on_one_process(family: str, changes: dict[str, Any], mode: Any, graphs: int) -> None:
    torch._dynamo.reset()
    plain = tiny_model(family, attention="sdpa", **changes).train()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, mode != "asked" and mode)
    apply_compile(model, backend=EAGER)
    if mode == "asked":
        model.gradient_checkpointing_enable()
    check(differences(plain, model), graphs)


def check(found: dict[str, Any], graphs: int) -> None:
    assert found.pop("error") < 1e-5
    assert found == {"graphs": graphs, "breaks": {}, "generated": True}


@pytest.mark.long
@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1)])
def test_graphs_of_three_lengths(dynamic: bool | None, graphs: int) -> None:
    model: Any = tiny_model("llama", attention="sdpa", num_hidden_layers=1).train()
    torch._dynamo.reset()
    counters.clear()
    apply_compile(model, backend=EAGER, dynamic=dynamic)
    for length in (20, 16, 12):
        model(input_ids=token_ids()[:, :length])
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_copy_has_its_own_weights() -> None:
    model: Any = tiny_model("llama", attention="sdpa", num_hidden_layers=1)
    apply_compile(model, backend=EAGER)
    other = copy.deepcopy(model)
    before = other(input_ids=token_ids()).logits
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(other(input_ids=token_ids()).logits, before)
    assert not torch.equal(model(input_ids=token_ids()).logits, before)


@pytest.mark.long
def test_the_default_backend_and_the_function_of_other_tools() -> None:
    model: Any = tiny_model("llama", attention="sdpa", num_hidden_layers=1).train()
    plain = gradients(copy.deepcopy(model), token_ids())
    apply_selective_activation_checkpointing(model, enable_compile=True)
    counters.clear()
    found = gradients(model, token_ids())
    assert counters["inductor"]
    assert not counters["graph_break"]
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_no_look_for_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", None)  # put back in the end
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    two_documents = torch.tensor([[0, 1, 2, 0, 1]])
    assume_no_packing(True)
    assert not modeling_flash_attention_utils._is_packed_sequence(two_documents, 1)
    assert masking_utils.find_packed_sequence_indices(two_documents) is None
    assume_no_packing(False)
    assert modeling_flash_attention_utils._is_packed_sequence(two_documents, 1)
    assert masking_utils.find_packed_sequence_indices(two_documents) is not None


class Reads(TorchDispatchMode):
    """Counts values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_forward_pass_without_packed_documents_reads_nothing(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    model, found = tiny_model("llama", attention=attention), []
    for assume in (False, True):
        assume_no_packing(assume)
        with Reads() as reads:
            logits = model.model(input_ids=token_ids(), use_cache=False).last_hidden_state
        found.append((reads.count, logits))
    assume_no_packing(False)
    assert [count for count, _ in found] == [1, 0]
    assert torch.equal(found[0][1], found[1][1])


def test_refused() -> None:
    with pytest.raises(ValueError, match="Linear has none"):
        apply_compile(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="do nothing without enable_compile"):
        FSDP2Config(compile_dynamic=True)
