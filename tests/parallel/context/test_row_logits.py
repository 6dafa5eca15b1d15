"""What users do with the logits of a model that computed its loss from a rank's rows, against one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_automodel._compat.torch.tensors import reads_of_data
from lightning_automodel.loss import gather_logits
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import whole

BOUND = 5e-5
Numbers = list[Tensor]


def judged(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---- what is written -------------------------------------------------------------------------------------------------


def token_left_out(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    output.logits[:, :, 7] = -5.0
    return judged(output.logits, ids)


def cooled(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    logits = output.logits.float()
    logits /= 2
    logits.clamp_(-1, 1)
    return judged(output.logits, ids) + logits.square().mean()


def written_through_views(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    with torch.no_grad():
        numbers.append(output.logits.argmax(-1).sum())
    output.logits[..., 3].mul_(2.0)
    output.logits[:, -1].fill_(0.5)
    return judged(output.logits, ids)


def written_copy(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    read = output.logits.detach().clone()
    read[..., 5] = -9.0
    read /= 2
    numbers += [read.softmax(-1)[..., 5].sum(), output.logits.detach().sum()]
    return output.logits.square().mean()


def written_data(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    output.logits.data[..., 3] = -4.0
    return output.logits.square().mean()


def written_in_evaluation(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = model(input_ids=ids, labels=ids).logits
        logits[..., 7] = 9.0
        return logits.softmax(-1)


# ---- gradients -------------------------------------------------------------------------------------------------------


class OwnCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shares = gather_logits(logits).softmax(-1)
        ctx.save_for_backward(shares, targets)
        return -shares.gather(-1, targets[..., None]).log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        shares, targets = ctx.saved_tensors
        return grads[0] * (shares - functional.one_hot(targets, shares.shape[-1])) / targets.numel(), None


def own_function(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    return OwnCrossEntropy.apply(output.logits, ids.roll(-1, 1))


def hooked(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    output.logits.register_hook(lambda gradient: numbers.append(whole(gradient).norm()))
    output.logits.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return output.logits[:, 3:].square().mean()


def asked_for(output: Any, ids: Tensor, numbers: Numbers) -> Tensor:
    (gradient,) = torch.autograd.grad(output.loss, output.logits, retain_graph=True)
    numbers.append(gradient)
    return output.logits.mean()


KINDS = (token_left_out, cooled, written_through_views, written_copy, written_data, own_function, hooked, asked_for)
WITH_TP = (own_function, hooked)
"""Kinds that are right with logits that are cut on the vocabulary, too; the others are errors there."""


def loss_errors(kinds: list[Callable], sizes: dict[str, int]) -> dict[str, float]:
    """Runs on each rank: the errors of loss, gradients and numbers."""
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(0))
    reference = tiny_model("llama").train()
    reads_of_data(torch.zeros(1))  # as the strategies do
    errors = {}
    for kind in kinds:
        mesh = build_mesh(resolve_sizes(2 * sizes.get("tp", 1), **sizes), "cpu")
        found = []
        for model in (copy.deepcopy(reference), parallelize(copy.deepcopy(reference), mesh).train()):
            numbers: Numbers = []
            output = model(input_ids=ids, labels=ids)
            loss = output.loss + kind(output, ids, numbers)
            loss.backward()
            values = {name: whole(p.grad) for name, p in model.named_parameters()} | {"loss": loss.detach()}
            if "tp" not in sizes:
                values["evaluated"] = written_in_evaluation(model, ids)
            found.append(values | {f"number {i}": number.float() for i, number in enumerate(numbers)})
        assert found[0].keys() == found[1].keys()
        for name, e in found[0].items():
            errors[f"{kind.__name__}: {name}"] = float((found[1][name] - e).norm() / e.norm().clamp(min=1e-6))
    return errors


@pytest.mark.parametrize(
    ("kinds", "sizes"), with_long([(KINDS, {"cp": 2}), (WITH_TP, {"cp": 2, "tp": 2})], (WITH_TP, {"cp": 2, "tp": 2}))
)
def test_what_users_do_with_logits_beside_a_loss(
    kinds: tuple[Callable, ...], sizes: dict[str, int], pool2: Pool, pool4: Pool
) -> None:
    for result in (pool4 if "tp" in sizes else pool2).run(loss_errors, list(kinds), sizes):
        assert {name: error for name, error in result.items() if error > BOUND} == {}


def keep_a_gradient() -> None:
    model = parallelize(tiny_model("llama"), build_mesh(resolve_sizes(2, cp=2), "cpu")).train()
    ids = torch.arange(26).view(2, 13)
    model(input_ids=ids, labels=ids).logits.retain_grad()


def test_a_gradient_that_is_not_kept_is_told(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="register_hook sees that of all rows, or call the model without"):
        pool2.run(keep_a_gradient)
