"""What a model that was called with labels, or without them, returns, and what happens to models that differ."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.config import FSDP2Config
from lightning_automodel.loss import gather_logits
from lightning_automodel.loss.install import install_loss
from lightning_automodel.loss.model_losses import causal_lm_loss
from lightning_automodel.mesh import TP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallel.tensor.apply import apply_tensor_parallel, install_copies
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model

LLAMA = {"vocab_size": 131, "tie_word_embeddings": True}


def make(tp: int = 2, family: str = "llama", **config: Any) -> tuple[nn.Module, nn.Module]:
    """The model on one process, and its copy on a mesh."""
    reference = tiny_model(family, **LLAMA)
    mesh = build_mesh(resolve_sizes(torch.distributed.get_world_size(), tp=tp), "cpu")
    return reference, parallelize(copy.deepcopy(reference), mesh, FSDP2Config(**config))


def text(rows: int = 2) -> Tensor:
    return torch.randint(3, 131, (rows, 10), generator=torch.Generator().manual_seed(0))


def gradient(model: nn.Module) -> Tensor:
    grad = model.get_input_embeddings().weight.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def assert_same_step(model: nn.Module, reference: nn.Module, *args: Any, **batch: Any) -> None:
    """Equal loss and gradient."""
    losses = []
    for module in (model, reference):
        module.zero_grad()
        losses.append(module(*args, **batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(gradient(model), gradient(reference))


# ---- logits ----------------------------------------------------------------------------------------------------------


def logits_of_calls() -> None:
    reference, model = make()
    ids = text()
    expected = reference(ids).logits
    given = model(ids, labels=ids).logits
    assert isinstance(given, DTensor)
    assert given.placements == (Shard(2),)
    torch.testing.assert_close(gather_logits(given), expected)
    plain = model(ids).logits
    assert not isinstance(plain, DTensor)
    torch.testing.assert_close(plain, expected)
    assert model(ids, labels=ids, return_dict=False)[1].placements == (Shard(2),)


def losses_of_users() -> None:
    """From logits that came without labels or with them, gathered or not."""
    reference, model = make()
    ids = text()

    def own_loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)

    def by_position(logits: Tensor) -> Tensor:
        losses = cross_entropy(logits.float()[..., :-1, :].contiguous().transpose(1, 2), ids[:, 1:], reduction="none")
        return losses[:, 2:].mean()

    for loss in (own_loss, by_position):
        reference.zero_grad()
        expected = loss(reference(ids).logits)
        expected.backward()
        for call, given in (({}, gather_logits), ({"labels": ids}, gather_logits), ({"labels": ids}, lambda x: x)):
            model.zero_grad()
            value = loss(given(model(ids, **call).logits))
            value.backward()
            torch.testing.assert_close(value, expected)
            torch.testing.assert_close(gradient(model), gradient(reference))


def losses_that_need_whole_logits() -> None:
    reference, model = make()
    logits, whole = (each(text(), labels=text()).logits for each in (model, reference))
    for other in ({"weight": torch.rand(131)}, {"target": torch.rand(2, 131, 10), "reduction": "sum"}):
        value, expected = (cross_entropy(x.mT, **{"target": text(), **other}) for x in (logits, whole))
        torch.testing.assert_close(value, expected)


def chunked_returns_no_logits() -> None:
    reference, model = make(chunked_loss=4)
    ids = text()
    output = model(ids, labels=ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, reference(ids, labels=ids).loss)
    assert output["logits"] is None
    assert output.to_tuple()[1] is None
    assert model(ids, labels=ids, return_dict=False)[1] is None
    torch.testing.assert_close(model(ids).logits, reference(ids).logits)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels=ids).loss, reference(ids, labels=ids).loss)
    written = [m.generate(ids, max_new_tokens=3, do_sample=False) for m in (model, reference)]
    assert torch.equal(*written)


# ---- arguments -------------------------------------------------------------------------------------------------------


def arguments_of_the_loss(config: dict[str, Any]) -> None:
    reference, model = make(**config)
    ids = text()
    position = list(inspect.signature(reference.forward).parameters).index("labels")
    assert_same_step(model, reference, input_ids=ids, labels=ids, num_items_in_batch=7)
    assert_same_step(model, reference, input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(9))
    assert_same_step(model, reference, input_ids=ids, labels=ids.clone().fill_(5), shift_labels=ids)
    assert_same_step(model, reference, input_ids=ids, labels=ids.masked_fill(ids < 50, 130), ignore_index=130)
    assert_same_step(model, reference, ids, *[None] * (position - 1), ids)
    reference.loss_function = causal_lm_loss  # transformers' own ignores label smoothing
    assert_same_step(model, reference, input_ids=ids, labels=ids, label_smoothing=0.2)


def nothing_to_learn(config: dict[str, Any], tp: int) -> None:
    _, model = make(tp=tp, **config)
    ids = text()
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert not gradient(model).any()


# ---- losses in the code of a model -----------------------------------------------------------------------------------


class Shifting(LlamaForCausalLM):
    """Computes its loss itself, as code that comes with a checkpoint does."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        logits, loss = self.lm_head(self.model(input_ids).last_hidden_state).float(), None
        if labels is not None:
            shifted = logits[..., :-1, :].contiguous()
            criterion = nn.CrossEntropyLoss()
            loss = criterion(shifted.view(-1, self.config.vocab_size), labels[..., 1:].contiguous().view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


class Derived(LlamaForCausalLM):
    """Leaves the loss to its base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def arguments_that_are_handed_on() -> None:
    """The third of them is not the labels."""
    reference, ids = tiny_model("llama", **LLAMA), text()
    position = list(inspect.signature(reference.forward).parameters).index("labels")
    reference.__class__ = Derived
    model = parallelize(
        copy.deepcopy(reference), build_mesh(resolve_sizes(2, tp=2), "cpu"), FSDP2Config(chunked_loss=4)
    )
    arguments = ids, torch.ones_like(ids), torch.arange(10).expand(2, -1)
    torch.testing.assert_close(*(m(*arguments).logits for m in (model, reference)))
    assert_same_step(model, reference, ids, *[None] * (position - 1), ids)
    assert model(ids, *[None] * (position - 1), ids).logits is None


class Own(Shifting):
    """Calls its base without labels, and computes another loss of what that gives."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        output = super().forward(input_ids)
        output.loss = cross_entropy(output.logits.transpose(1, 2), labels, label_smoothing=0.1)
        return output


class Changing(LlamaForCausalLM):
    """Changes its logits in place, as code of MPT does: shards refuse that, so they are whole."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        logits *= 0.5
        logits[..., 3] = -1.0
        loss = None if labels is None else cross_entropy(logits.mT, labels)
        return CausalLMOutput(loss=loss, logits=logits)


def changed_in_place() -> None:
    reference, mesh = tiny_model("llama", **LLAMA), build_mesh(resolve_sizes(2, tp=2), "cpu")
    reference.__class__ = Changing
    assert_same_step(parallelize(copy.deepcopy(reference), mesh), reference, input_ids=text(), labels=text())
    parallelize(reference, mesh, FSDP2Config(chunked_loss=4))(text(), labels=text())


def losses_in_the_code_of_a_model(kind: type[LlamaForCausalLM], config: dict[str, Any]) -> None:
    reference, mesh = tiny_model("llama", **LLAMA), build_mesh(resolve_sizes(2, tp=2), "cpu")
    reference.__class__ = kind
    model = parallelize(copy.deepcopy(reference), mesh, FSDP2Config(**config))
    assert_same_step(model, reference, input_ids=text(), labels=text().masked_fill(text() < 40, -100))
    logits = model(input_ids=text(), labels=text()).logits
    assert logits is None if config else isinstance(logits, DTensor)


@pytest.mark.parametrize("config", [{}, {"chunked_loss": 4}], ids=str)
@pytest.mark.parametrize("kind", [Shifting, Derived, Own])
def test_losses_in_the_code_of_a_model(kind: Any, config: dict[str, Any], pool2: Pool) -> None:
    pool2.run(losses_in_the_code_of_a_model, kind, config)


# ---- compile ---------------------------------------------------------------------------------------------------------


def compiled_blocks() -> None:
    """With the sequence cut; the graphs are captured, the code is torch's own."""
    reference, model = make(chunked_loss=4, sequence_parallel=True)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    assert_same_step(model, reference, input_ids=text(), labels=text())


def compiled_function() -> None:
    """The chunked loss inside of a compiled function, its weight cut over the ranks."""
    torch.manual_seed(0)
    group, labels = torch.distributed.group.WORLD, torch.randint(9, (8,))
    hidden, weight = torch.randn(8, 4), torch.randn(9, 4)
    rows = weight[:5] if group.rank() == 0 else weight[5:]

    def loss(hidden: Tensor, rows: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden * 2, rows, labels, chunk_size=3, group=group, vocab_size=9)

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        inputs = [hidden.clone().requires_grad_(), rows.clone().requires_grad_()]
        value = function(*inputs)
        value.backward()
        found.append([value, *(x.grad for x in inputs)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[0][0], cross_entropy(2 * hidden @ weight.T, labels))


# ---- robustness ------------------------------------------------------------------------------------------------------


def copies_and_exceptions(config: dict[str, Any]) -> None:
    """A copy made between the stages works by itself; FSDP2 modules cannot be copied."""
    reference, ids, settings = tiny_model("llama", **LLAMA), text(), FSDP2Config(**config)
    model = copy.deepcopy(reference)
    tp_mesh = axis(build_mesh(resolve_sizes(2, tp=2), "cpu"), TP)
    layout = derive_layout(model, select_plan(model), 2, settings.sequence_parallel)
    apply_tensor_parallel(model, tp_mesh, layout)
    install_copies(model, tp_mesh.get_group(), layout)
    install_loss(model, tp_mesh, settings)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_step(twin, reference, input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        twin(ids, labels=ids + 131)
    torch.testing.assert_close(twin(ids).logits, reference(ids).logits)
    assert_same_step(twin, reference, input_ids=ids, labels=ids)


def loss_functions_of_users() -> None:
    """Set before or after: they get whole logits."""

    def own(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        assert not isinstance(logits, DTensor)
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    ids = text()
    reference = tiny_model("llama", **LLAMA)
    reference.loss_function = own
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    before = parallelize(copy.deepcopy(reference), mesh)
    after = make()[1]
    after.loss_function = own
    for model in (before, after):
        assert_same_step(model, reference, input_ids=ids, labels=ids)


def operations_that_mix_logits() -> None:
    _, model = make(chunked_loss=4)
    model.lm_head.register_forward_hook(lambda module, args, output: output.softmax(-1))
    model(text(), labels=text())


def models_without_such_a_loss() -> None:
    make(family="prophetnet", tp=1, chunked_loss=4)


def cross_entropy_of_rows() -> None:
    mesh = build_mesh(resolve_sizes(2, cp=2), "cpu")
    parallelize(tiny_model("bart"), mesh, FSDP2Config(chunked_loss=4))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def heads_with_a_forward_of_their_own() -> None:
    reference = tiny_model("llama", **LLAMA | {"tie_word_embeddings": False})
    reference.lm_head.__class__ = Scaled
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    assert_same_step(parallelize(copy.deepcopy(reference), mesh), reference, input_ids=text(), labels=text())
    parallelize(reference, mesh, FSDP2Config(chunked_loss=4))


@pytest.mark.parametrize(
    "check",
    [
        logits_of_calls,
        losses_of_users,
        losses_that_need_whole_logits,
        chunked_returns_no_logits,
        arguments_that_are_handed_on,
        loss_functions_of_users,
        pytest.param(compiled_blocks, marks=pytest.mark.long),
        compiled_function,
    ],
)
def test_calls(check: Any, pool2: Pool) -> None:
    pool2.run(check)


@pytest.mark.parametrize("config", [{}, {"chunked_loss": 4}], ids=str)
@pytest.mark.parametrize("check", [arguments_of_the_loss, copies_and_exceptions])
def test_calls_with_labels(check: Any, config: dict[str, Any], pool2: Pool) -> None:
    pool2.run(check, config)


@pytest.mark.parametrize("config", [{}, {"chunked_loss": 4}], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_all_labels_ignored(config: dict[str, Any], tp: int, pool2: Pool) -> None:
    pool2.run(nothing_to_learn, config, tp)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (operations_that_mix_logits, "LlamaForCausalLM calls softmax on its logits.*use chunked_loss=None"),
        (models_without_such_a_loss, "ProphetNetForCausalLM computes neither .*'s cross entropy from one linear head"),
        (changed_in_place, "Changing calls mul_ on its logits"),
        (
            cross_entropy_of_rows,
            r"BartForCausalLM .* \(with cp > 1: transformers' loss alone\).*use cp=1, or use chunked_loss=None",
        ),
        (
            heads_with_a_forward_of_their_own,
            r"the vocabulary \(the forward pass of Scaled is its own\).*chunked_loss=None",
        ),
    ],
)
def test_models_that_need_their_logits(check: Any, message: str, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=message):
        pool2.run(check)
