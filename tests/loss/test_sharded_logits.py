"""Logits that are cut on the vocabulary give the numbers of whole ones in every function of torch, or a sharp error."""

from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.overrides import get_overridable_functions
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_automodel.distributed import logs
from lightning_automodel.distributed.collectives import shard_bounds
from lightning_automodel.loss.sharded_functions import FUNCTIONS
from lightning_automodel.loss.sharded_logits import ShardedLogits, ShardedLogitsError, join_shards
from lightning_automodel.testing.pool import Pool

BATCH, LENGTH, VOCABULARY = 2, 3, 11
SKIPPED = {
    "__get__", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_as_sparse_", "__reduce_ex__",
    "__repr__", "__dir__", "__hash__", "_make_subclass", "_make_wrapper_subclass", "fbgemm_pack_gemm_matrix_fp16",
    "_is_view", "set_",
}  # fmt: skip
"""Of which one call differs from the next, whose result is an object, or which torch does not pass on."""
ALIASES = {
    "subtract", "multiply", "divide", "true_divide", "negative", "swapaxes", "swapdims", "moveaxis", "__neg__",
    "__abs__", "__radd__", "__rmul__", "__truediv__", "sub", "add", "half", "double", "bfloat16", "log1p", "sqrt",
    "square",
}  # fmt: skip
USED = (FUNCTIONS.keys() - ALIASES) | {
    "__eq__", "__ne__", "sort", "argsort", "argmin", "amax", "kl_div", "sum", "mean", "isin",
    "numpy", "item", "tolist", "where", "masked_fill", "masked_fill_", "__setitem__", "einsum", "cat", "copy_",
    "data_ptr", "relu", "dropout", "index_select", "isfinite", "bernoulli", "unbind", "__iter__", "__len__",
}  # fmt: skip
"""Functions that metrics and losses call, and some that must be refused."""


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)


def cut(whole: Tensor, mesh: Any) -> ShardedLogits:
    start, length = shard_bounds(whole.shape[-1], mesh.size(), mesh.get_local_rank())
    return join_shards(whole.narrow(-1, start, length).clone(), mesh, whole.shape[-1])


def plain(value: Any) -> Any:
    return tree_map_only(ShardedLogits, lambda x: x.full_tensor(), value)


def same(actual: Any, expected: Any) -> bool:
    one, other = tree_leaves(actual), tree_leaves(expected)
    return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))


def same_shards(actual: Any, expected: Any, mesh: Any) -> bool:
    """Compares what is cut with the same slice of what is expected, without communication."""
    one, other = tree_leaves(actual), tree_leaves(expected)
    return len(one) == len(other) and all(
        _same(*_locals(a, b, mesh)) if isinstance(a, ShardedLogits) else _same(a, b)
        for a, b in zip(one, other, strict=True)
    )


def _locals(sharded: ShardedLogits, whole: Tensor, mesh: Any) -> tuple[Tensor, Tensor]:
    dim = sharded.placements[0].dim
    assert sharded.shape == whole.shape
    return sharded.to_local(), whole.narrow(dim, *shard_bounds(whole.shape[dim], mesh.size(), mesh.get_local_rank()))


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, numpy.ndarray):
        return numpy.array_equal(actual, expected)
    if not isinstance(expected, Tensor):
        return isinstance(actual, type(expected)) and (actual == expected or actual != actual or not _plain(expected))
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if actual.is_sparse or actual.is_quantized or actual.layout != torch.strided:
        return True
    return torch.allclose(actual.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | str | tuple | list)


IDS = torch.tensor([[1, 9, 5], [0, 10, 7]])
OTHER = numbers().flip(0)
ARGUMENTS: list[Callable[[Tensor], tuple]] = [
    lambda x: (x,), lambda x: (x, -1), lambda x: (x, 1), lambda x: (x, 0.5), lambda x: (x, 2), lambda x: (x, OTHER),
    lambda x: (OTHER, x), lambda x: (x, x), lambda x: (x, IDS), lambda x: (x, IDS[..., None]),
    lambda x: (x, -1, IDS[..., None]), lambda x: (x, 0, 1), lambda x: (x, -1, 2), lambda x: (x, (1, 0, 2)),
    lambda x: (x, OTHER, OTHER), lambda x: (x, IDS != 1), lambda x: (x, OTHER > 0, 0.0), lambda x: (OTHER > 0, x, 0.0),
    lambda x: (x, torch.float64), lambda x: (x, (slice(None), 1)), lambda x: (x, (..., 3)),
    lambda x: (x, (..., slice(1, None), slice(None))), lambda x: (x, (IDS != 1, 2)), lambda x: (x, (6, -1)),
    lambda x: (x, (-1,)), lambda x: ([x, x],), lambda x: ([x, OTHER], -1), lambda x: (x, 3, -1), lambda x: (x, 0, 3),
    lambda x: (x.flatten(0, 1), IDS.flatten()), lambda x: (x.transpose(1, 2), IDS), lambda x: (x, OTHER.mT),
    lambda x: (x[0], IDS[0]), lambda x: (x[0, 0],), lambda x: ("bsv,bsv->bs", x, OTHER), lambda x: (x[0], 0),
    lambda x: (x, OTHER[..., :1]),
]  # fmt: skip
"""What functions may be called with beside the logits."""
NAMED: list[dict[str, Any]] = [{}, {"dim": -1}, {"dim": -1, "keepdim": True}, {"dim": 1}, {"dtype": torch.float64}]


def calls(names: Set[str] | None) -> Iterator[tuple[str, Callable]]:
    seen = set()
    for functions in get_overridable_functions().values():
        for function in functions:
            name = getattr(function, "__name__", str(function))
            if function not in seen and name not in SKIPPED and (names is None or name in names):
                seen.add(function)
                yield name, function


def attempts(names: Set[str] | None) -> Iterator[tuple[str, Callable[[Tensor], Any], Any, Tensor]]:
    """Calls that whole logits allow: a name, what to call, what it gives, and the logits afterwards."""
    for name, function in calls(names):
        variants = [(make, {}) for make in ARGUMENTS] + [(ARGUMENTS[0], named) for named in NAMED[1:]]
        for i, (make, named) in enumerate(variants):
            call = partial(call_with, function, make, named)
            whole = numbers()
            try:
                expected = call(whole)
            except Exception:
                continue
            yield f"{name} {i}", call, expected, whole


def call_with(function: Callable, make: Callable, named: dict[str, Any], logits: Tensor) -> Any:
    torch.manual_seed(0)
    return function(*make(logits), **named)


def sweep(names: Set[str] | None) -> tuple[int, int, list[str]]:
    """Runs on each rank: calls that gave the same, that were refused, and all others."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    right, refused, wrong = 0, 0, []
    for name, call, expected, after in attempts(names):
        sharded = cut(numbers(), mesh)
        try:
            actual = call(sharded)
        except ShardedLogitsError:
            refused += 1
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        else:
            right += 1
            if not same_shards(actual, expected, mesh) or not same(sharded.to_local(), cut(after, mesh).to_local()):
                wrong.append(f"{name}: {actual} instead of {expected}"[:300])
    return right, refused, wrong


@pytest.mark.slow
@pytest.mark.parametrize("names", [USED, pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(1300)])])
def test_functions_of_torch_are_right_or_refused(names: Set[str] | None, pool2: Pool) -> None:
    for right, refused, wrong in pool2.run(sweep, names, timeout=100.0 if names else 1200.0):
        assert wrong == []
        assert right > 4 * refused > 0


# ---- gradients -------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """Returns what it gets, as FSDP2 does with all that enters a unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class OwnLoss(torch.autograd.Function):
    """Makes a whole gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x.softmax(-1), target)
        return F.cross_entropy(x, target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, target = ctx.saved_tensors
        return gradient * (probabilities - F.one_hot(target, VOCABULARY)) / len(target), None


LABELS = torch.tensor([[1, 9, -100], [0, 10, 7]])
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax and gather": lambda x: x.log_softmax(-1).gather(-1, IDS[..., None]).sum(),
    "log_softmax and nll_loss": lambda x: F.nll_loss(F.log_softmax(x.flatten(0, 1), dim=-1), LABELS.flatten()),
    "nll_loss of positions": lambda x: F.nll_loss(x.log_softmax(-1).mT, LABELS, reduction="none").square().sum(),
    "cross_entropy": lambda x: F.cross_entropy(x[:, :-1].transpose(1, 2), LABELS[:, :-1], label_smoothing=0.1),
    "scaled": lambda x: F.cross_entropy((x.float() / SCALE).tanh().view(-1, VOCABULARY) * 3.0, LABELS.view(-1)),
    "temperatures": lambda x: F.cross_entropy((x * OTHER[..., :1]).flatten(0, 1), LABELS.flatten()),
    "maximum": lambda x: (x.max(-1).values * OTHER[..., 0]).sum(),
    "topk": lambda x: (x.topk(3).values * OTHER[..., :3]).sum(),
    "logsumexp": lambda x: x.logsumexp(-1).square().sum(),
    "softmax": lambda x: (x.softmax(-1) * OTHER).sum(),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "of some tokens": lambda x: F.cross_entropy(x[LABELS >= 0], LABELS[LABELS >= 0]),
    "distance": lambda x: (x - OTHER).square().mean(),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), OTHER.log_softmax(-1), log_target=True, reduction="batchmean"),
    "one": lambda x: x[0, 1, 7] * 2 + x[1].sum(),
    "reversed": lambda x: (Reversed.apply(x.exp()) @ OTHER.mT).square().sum() + x.logsumexp(-1).sum(),
    "loss of one's own": lambda x: OwnLoss.apply(x[:, 1:].flatten(0, 1), IDS[:, 1:].flatten()) + x.logsumexp(-1).sum(),
}
SCALE = torch.tensor(0.7, requires_grad=True)
USUAL = (
    "log_softmax and gather",
    "log_softmax and nll_loss",
    "nll_loss of positions",
    "cross_entropy",
    "scaled",
    "temperatures",
)
USUAL_NUMBERS = (*USUAL, "maximum", "topk", "logsumexp", "of some tokens")


def gradients() -> dict[str, tuple[bool, bool, bool]]:
    """Runs on each rank: whether the value, the gradients and the use of whole logits are as they should be."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for name, value_of in VALUES.items():
        logs._seen.clear()
        whole, sharded = numbers().requires_grad_(), cut(numbers(), mesh).requires_grad_()
        results = []
        for logits in (whole, sharded):
            SCALE.grad = None
            value = value_of(logits)
            value.backward()
            results.append((value.detach(), plain(logits.grad), SCALE.grad))
        (expected, gradient, scale), (value, sharded_gradient, sharded_scale) = results
        gathers = any("gathers whole ones" in message for message in logs._seen)
        is_alike = same(sharded_gradient, gradient) and same(sharded_scale, scale)
        found[name] = (same(value, expected), is_alike, not (gathers and name in USUAL_NUMBERS))
    return found


def test_gradients_are_those_of_whole_logits(pool2: Pool) -> None:
    for found in pool2.run(gradients):
        assert {name: right for name, right in found.items() if not all(right)} == {}


def dtypes_under_autocast() -> None:
    """Runs on each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = numbers().bfloat16()
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for logits in (whole, cut(whole, mesh)):
            logs = logits.log_softmax(-1)
            losses = [F.nll_loss(logs.mT, LABELS, reduction=reduction) for reduction in ("mean", "sum", "none")]
            found.append([*losses, logits.softmax(-1).dtype, logits.logsumexp(-1).dtype, logs.dtype])
    torch.testing.assert_close(found[1][:3], found[0][:3], rtol=1e-2, atol=0)
    assert found[1][3:] == found[0][3:]


def test_dtypes_under_autocast(pool2: Pool) -> None:
    pool2.run(dtypes_under_autocast)


def accuracy() -> tuple[int, int, str, bool]:
    """Runs on each rank: a masked accuracy as users write it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = numbers().index_fill(2, torch.tensor([3, 8]), 5.0)  # two that are equal, on two ranks
    sharded, labels = cut(whole, mesh), whole.argmax(-1)
    hits = ((sharded.argmax(-1) == labels) & (IDS != 9)).sum()
    try:
        sharded += 1
    except ShardedLogitsError as error:
        refusal = str(error)
    bad = cut(whole.index_fill(2, torch.tensor([9]), torch.nan), mesh)
    return int(hits), int((sharded == whole).sum()), refusal, bool((bad.argmax(-1) == 9).all())


def test_masked_accuracy(pool2: Pool) -> None:
    for hits, equal, refusal, knows_nan in pool2.run(accuracy):
        assert (hits, equal) == (5, BATCH * LENGTH * VOCABULARY)
        assert "add_ was called with logits that are cut on the vocabulary; use lightning_automodel" in refusal
        assert knows_nan


def written_results() -> list[bool]:
    """Runs on each rank: results in the place of a plain tensor."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = numbers()
    functions = [
        lambda logits, out: torch.mul(logits, 2, out=out),
        lambda logits, out: torch.exp(logits, out=out),
        lambda logits, out: torch.add(logits, 1.0, out=out),
        lambda logits, out: torch.softmax(logits, -1, out=out),
    ]
    outcomes = []
    for function in functions:
        expected, found = torch.zeros_like(whole), torch.zeros_like(whole)
        function(whole, expected)
        function(cut(whole, mesh), found)
        outcomes.append(found.equal(expected))
    return outcomes


def test_results_in_the_place_of_plain_tensors_are_whole(pool2: Pool) -> None:
    for outcomes in pool2.run(written_results):
        assert all(outcomes), outcomes
