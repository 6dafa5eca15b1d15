"""Asynchronous tensor parallelism: which collectives are fused with matmuls, the same numbers, clear refusals.

There is no symmetric memory on CPU: torch's fallbacks of the fused operations run in its place.
"""

from collections import Counter
from functools import partial

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel._compat.torch.compilation import overlap_in_compiled_graphs
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed import logs
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel import stages
from lightning_automodel.parallelizer import fsdp2_strategy_parallelize, parallelize
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.parallel.levers.symmetric import fuse_on_cpu
from tests.plans.support import build_llama
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

ASYNC = {"enable_async_tensor_parallel": True, "enable_compile": True}


def with_fallbacks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    stages.overlap_tensor_parallel = lambda tp_mesh: overlap_in_compiled_graphs(tp_mesh.get_group())
    return fsdp2_strategy_parallelize(model, mesh, MixedPrecisionPolicy(), **ASYNC)


def fused() -> tuple[float, str, Counter[str]]:
    """Runs on each rank: one block, one micro-batch."""
    calls: Counter[str] = Counter()
    fuse_on_cpu(calls)
    build = partial(tiny_model, "llama", attention="sdpa", num_hidden_layers=1)
    schedule = Schedule(steps=1, micro_batches=1, length=12)
    return (*compare(build, {"tp": 2}, 2, schedule, make_parallel=with_fallbacks).largest, calls)


@pytest.mark.long
def test_what_is_fused_and_its_numbers(pool2: Pool) -> None:
    # The gradients of q, k, v (gate, up) are summed before they are scattered: no single matmul feeds that.
    forward, backward = {"gather for 3": 1, "gather for 2": 1, "scatter": 2}, {"gather for 1": 2}
    for error, where, calls in pool2.run(fused, timeout=110):
        assert error <= 1e-5, where
        assert calls == {**forward, **backward}


def on_cpu() -> None:
    """Runs on each rank."""
    parallelize(
        build_llama(),
        build_mesh(resolve_sizes(dist.get_world_size(), tp=dist.get_world_size()), "cpu"),
        FSDP2Config(**ASYNC),
    )


def test_sequence_parallel_is_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    with pytest.warns(UserWarning, match="enable_async_tensor_parallel=True turns sequence_parallel on") as seen:
        assert [FSDP2Config(**ASYNC).sequence_parallel for _ in range(2)] == [True, True]
    assert len(seen) == 1


def test_refused(nursery: Nursery, pool2: Pool) -> None:
    with pytest.raises(ValueError, match="compiled blocks; set enable_compile=True as well"):
        FSDP2Config(enable_async_tensor_parallel=True)
    with pytest.raises(ValueError, match="set compile_backend='inductor' as well"):
        FSDP2Config(**ASYNC, compile_backend="aot_eager")
    with pytest.raises(RankFailed, match=r"the mesh is on 'cpu' and communicates with .*gloo"):
        pool2.run(on_cpu)
    Pool(nursery, 1).run(on_cpu)  # a warning
