"""Gradients of gradients (gradient penalties, learning to learn): those of one process, or an error that says why."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_automodel import DDPStrategy, FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import make_trainer

VOCABULARY, LENGTH = 29, 12
CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # of gradients up to 130; norms and the loss of the model compute in float32


def build(family: str = "llama") -> Any:
    """Build a tiny model in float64, whose attention can be differentiated twice.

    The grouped products of experts know no such numbers.
    """
    return tiny_model(family, experts="eager").double().train()


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- objectives: a loss, and something of its gradient ---------------------------------------------------------------


def loss_of(model: Any, ids: Tensor, smoothing: float = 0.0) -> Tensor:
    """The model's own loss, or one of its logits with smoothed labels."""
    if not smoothing:
        return model(input_ids=ids, labels=ids).loss
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=smoothing)


def penalty_of_embeddings(model: Any, ids: Tensor, smoothing: float = 0.0) -> Tensor:
    """A gradient penalty, as of Gulrajani et al. 2017."""
    embedded = {}
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, output: embedded.update(x=output))
    loss = loss_of(model, ids, smoothing)
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, embedded["x"], create_graph=True)
    return loss + 10 * gradient.square().sum()


def penalty_of_parameters(model: Any, ids: Tensor) -> Tensor:
    """The norm of the gradient, as sharpness-aware training takes it."""
    loss = model(input_ids=ids, output_hidden_states=True).hidden_states[-1].square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
    return loss + sum(whole(gradient).square().sum() for gradient in gradients if gradient is not None)


OBJECTIVES = {
    "embeddings": penalty_of_embeddings,
    "smoothed": lambda model, ids: penalty_of_embeddings(model, ids, 0.1),
    "parameters": penalty_of_parameters,
}


def differentiate(model: Any, objective: str) -> dict[str, Tensor]:
    """Return the objective, and its gradient by parameter."""
    value = OBJECTIVES[objective](model, tokens())
    value.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"objective": value.detach(), **gradients}


def on_ranks(
    sizes: dict[str, int], switches: dict[str, Any], objective: str, family: str = "llama"
) -> dict[str, Tensor]:
    """Runs on each rank."""
    model = parallelize(build(family), build_mesh(resolve_sizes(2, **sizes), "cpu"), FSDP2Config(**switches))
    return differentiate(model, objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("switches", [{}, {"sequence_parallel": True}], ids=["tp", "sequence-parallel"])
def test_as_on_one_process(switches: dict[str, Any], objective: str, pool2: Pool) -> None:
    expected = differentiate(build(), objective)
    assert len(expected) > 15
    for found in pool2.run(on_ranks, {"tp": 2}, switches, objective):
        torch.testing.assert_close(found, expected, **CLOSE)


FAMILIES = with_long(
    ["deepseek_v3", "gemma3_text", "mixtral", "doge", "glm4_moe", "nemotron", "olmo2", "qwen2_5_vl", "qwen3_5_text"],
    *["doge", "glm4_moe", "mixtral", "nemotron", "olmo2", "qwen2_5_vl", "qwen3_5_text"],
)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, pool2: Pool) -> None:
    expected = differentiate(build(family), "parameters")
    for found in pool2.run(on_ranks, {"tp": 2}, {"sequence_parallel": True}, "parameters", family):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("sizes", "switches", "message"),
    [
        ({"dp_shard": 2}, {}, "FSDP2 shards over data ranks.*use DDPStrategy"),
        ({"cp": 2}, {}, "FSDP2 shards over data ranks.*use DDPStrategy"),
        ({"tp": 2}, {"chunked_loss": 8}, "a loss in chunks gives no gradient of a gradient.*chunked_loss=None"),
    ],
    ids=["dp_shard", "cp", "chunked_loss"],
)
def test_what_has_none_says_so(sizes: dict[str, int], switches: dict[str, Any], message: str, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=f"(?s)create_graph=True: .*{message}"):
        pool2.run(on_ranks, sizes, switches, "embeddings")


# ---- the way out -----------------------------------------------------------------------------------------------------


class Penalized(L.LightningModule):
    """Trains with a gradient penalty."""

    def configure_model(self) -> None:
        self.model = build()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return penalty_of_embeddings(self.model, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train() -> dict[str, Tensor]:
    """Runs on each rank: three steps, each rank on its own row."""
    module = Penalized()
    run = make_trainer(DDPStrategy(), max_steps=3)
    run.fit(module, DataLoader(TensorDataset(tokens(6)), batch_size=1))
    return {name: p.detach().clone() for name, p in module.model.named_parameters()}


def test_replicas(pool2: Pool) -> None:
    model, rows = build(), tokens(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        sum(penalty_of_embeddings(model, rows[[2 * step + rank]]) / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in pool2.run(train, trainer=True):
        torch.testing.assert_close(found, dict(model.named_parameters()), **CLOSE)


# ---- a graph that is kept ----------------------------------------------------------------------------------------


def two_passes(sizes: dict[str, int], switches: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank: two backward passes through one graph."""
    model = parallelize(build(), build_mesh(resolve_sizes(2, **sizes), "cpu"), FSDP2Config(**switches)).train()
    loss = loss_of(model, tokens())
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("sizes", "switches"),
    [({"cp": 2}, {}), ({"cp": 2}, {"activation_checkpointing": True}), ({"tp": 2}, {"activation_checkpointing": True})],
    ids=["cp", "cp-checkpointing", "tp-checkpointing"],
)
def test_two_backward_passes(sizes: dict[str, int], switches: dict[str, Any], pool2: Pool) -> None:
    model = build()
    (2 * loss_of(model, tokens())).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in pool2.run(two_passes, sizes, switches):
        torch.testing.assert_close(found, expected, **CLOSE)
