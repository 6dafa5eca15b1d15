"""Norm and clipping of gradients on a mesh, against one vector of all of them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.gradients import clip_grad_by_total_norm_, clip_grad_norm_, get_grad_norm, to_local_if_dtensor
from lightning_automodel.mesh import DP_CP, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.loss.cases import for_all
from tests.support.families import tiny_model

PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Shard(1)])


@dataclass(frozen=True)
class Drawn:
    """A gradient: its shape, its seed (``None``: all zeros), its placements (``None``: a plain tensor)."""

    shape: tuple[int, int]
    seed: int | None
    placements: tuple[Placement, Placement] | None

    def value(self) -> Tensor:
        if self.seed is None:
            return torch.zeros(self.shape)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))


GRADIENTS = st.lists(
    st.builds(
        Drawn,
        shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),  # fewer than ranks: some shards are empty
        seed=st.none() | st.integers(0, 1 << 30),
        placements=st.none() | st.tuples(PLACEMENTS, PLACEMENTS),
    ),
    max_size=5,
)


def parameters_of(drawn: list[Drawn], mesh: DeviceMesh) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(3))]  # without a gradient
    for gradient in drawn:
        value = gradient.value()
        if gradient.placements is not None:
            value = distribute_tensor(value, mesh, gradient.placements, src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value
        found.append(parameter)
    return found


def check_norms() -> None:
    """On 2 data ranks with 2 tensor-parallel ranks each."""
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    groups = mesh["dp_cp"].get_group(), mesh["tp"].get_group()

    @for_all(GRADIENTS, st.sampled_from([0.5, 1.0, 2.0, 3.0, float("inf")]), examples=60)
    def check(drawn: list[Drawn], order: float) -> None:
        parameters = parameters_of(drawn, mesh["dp_shard", "tp"])
        vector = torch.cat([torch.zeros(1), *(d.value().flatten() for d in drawn)])
        expected = torch.linalg.vector_norm(vector.double(), order).item()
        actual = get_grad_norm(parameters, *groups, norm_type=order)
        assert isinstance(actual, float)
        assert actual == pytest.approx(expected, rel=1e-5)
        clip_grad_by_total_norm_(parameters, 0.7, actual)
        clipped = get_grad_norm(parameters, *groups, norm_type=order, dtype=torch.float64)
        assert clipped == pytest.approx(min(expected, 0.7), rel=1e-5)

    check()


@pytest.mark.slow
def test_norms(pool4: Pool) -> None:
    pool4.run(check_norms)


def norm_where_some_have_no_gradient() -> float:
    """On 2 data ranks, of which one has nothing to add."""
    mesh = build_mesh(resolve_sizes(2, dp_shard=2), "cpu")
    value = None if mesh["dp_cp"].get_local_rank() else torch.tensor([2.0, 4.0, 4.0])
    return get_grad_norm(plain(value), mesh["dp_cp"].get_group(), None)


def test_ranks_without_gradients_take_part(pool2: Pool) -> None:
    assert pool2.run(norm_where_some_have_no_gradient) == pytest.approx([18**0.5] * 2)


def norm_without_a_group(missing: str) -> float:
    """On 2 data ranks with 2 tensor-parallel ranks each."""
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    groups = {"dp_cp_group": axis(mesh, DP_CP).get_group(), "tp_group": axis(mesh, TP).get_group(), missing: None}
    cut = {"dp_cp_group": [Shard(0), Replicate()], "tp_group": [Replicate(), Shard(0)]}
    whole = {name: [*reversed(placements)] for name, placements in cut.items()}
    for placements in (whole, cut):  # without the group, what no other rank holds a part of is right
        value = distribute_tensor(torch.ones(4, 4), mesh["dp_shard", "tp"], placements[missing], src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value
        assert get_grad_norm(parameter, **groups) == pytest.approx(4.0)
    return 0.0


@pytest.mark.parametrize(("missing", "axis_name"), [("dp_cp_group", "dp_shard"), ("tp_group", "tp")])
def test_a_group_that_is_missing_is_named(missing: str, axis_name: str, pool4: Pool) -> None:
    with pytest.raises(RankFailed, match=rf"axis {axis_name} of its mesh.*pass dp_cp_group=axis\(mesh, DP_CP\)"):
        pool4.run(norm_without_a_group, missing)


class Synchronizations(TorchDispatchMode):
    """Counts what makes the host wait for the device: values that leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def count_synchronizations() -> tuple[int, int]:
    """Of a loop of one's own, and of ``clip_grad_norm_``; gradients of a model with every kind of placement."""
    mesh = build_mesh(resolve_sizes(4, dp_shard=2, tp=2), "cpu")
    model = parallelize(tiny_model("llama"), mesh)
    ids = torch.arange(3, 23).view(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    groups = mesh["dp_cp"].get_group(), mesh["tp"].get_group()
    with Synchronizations() as own:
        norm = get_grad_norm(model.parameters(), *groups)
        clip_grad_by_total_norm_(model.parameters(), norm / 2, norm)
    with Synchronizations() as stock:
        clip_grad_norm_(model.parameters(), norm / 4)
    assert get_grad_norm(model.parameters(), *groups) == pytest.approx(norm / 4, rel=1e-4)
    return own.count, stock.count


def test_one_host_synchronization_or_none(pool4: Pool) -> None:
    assert pool4.run(count_synchronizations) == [(1, 0)] * 4


def plain(value: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = value
    return parameter


def test_one_process() -> None:
    parameter = plain(torch.tensor([3.0, 0.0, 4.0]))
    assert get_grad_norm(parameter, None, None) == 5.0
    clip_grad_by_total_norm_(parameter, 1.0, 5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
    clip_grad_by_total_norm_(parameter, 2.0, 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
    clip_grad_norm_(parameter, 0.5)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.3, 0.0, 0.4]))
    assert to_local_if_dtensor(parameter) is parameter


def test_no_gradient() -> None:
    assert get_grad_norm([plain(None)], None, None) == 0.0
    assert get_grad_norm([], None, None, norm_type=float("inf")) == 0.0
    clip_grad_by_total_norm_([plain(None)], 1.0, 0.0)


def test_narrow_gradients_are_measured_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    assert get_grad_norm(parameter, None, None) == pytest.approx(64 * parameter.grad[0].item(), rel=1e-5)


def test_wide_gradients_are_clipped_beside_others() -> None:
    wide, other = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2))
    for parameter in (wide, other):
        parameter.grad = 2 * torch.ones_like(parameter)
    assert clip_grad_norm_([wide, other], 2.0) == pytest.approx(4.0)
    assert wide.grad is not None
    assert torch.allclose(wide.grad, torch.ones(2, dtype=torch.float64))
    assert get_grad_norm([wide, other], None, None) == pytest.approx(2.0)


def test_a_norm_that_is_not_finite_shows() -> None:
    parameter = plain(torch.tensor([float("nan"), 1.0, 2.0]))
    norm = get_grad_norm(parameter, None, None)
    clip_grad_by_total_norm_(parameter, 1.0, norm)
    assert parameter.grad.isnan().all()


@pytest.mark.parametrize("order", [0.0, -1.0, float("-inf"), float("nan")])
def test_orders_that_are_none(order: float) -> None:
    with pytest.raises(ValueError, match="is not the order of a norm"):
        get_grad_norm(plain(torch.ones(3)), None, None, order)
    with pytest.raises(ValueError, match="is not the order of a norm"):
        clip_grad_norm_([plain(torch.ones(3))], 1.0, order)
