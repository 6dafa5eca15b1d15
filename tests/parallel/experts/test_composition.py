"""Expert parallelism beside other levers, each against one process."""

import pytest
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.collectives import gather, gather_in, scatter_out
from lightning_automodel.parallel.experts.dispatch import Rows
from lightning_automodel.testing.pool import Pool
from tests.exactness.test_families import check, errors
from tests.parallel.experts.test_exact import EIGHT
from tests.support.comparison import Schedule
from tests.support.marks import with_long
from tests.support.run_family import Run


def gather_all(
    hidden: Tensor, index: Tensor, weights: Tensor, run: Rows, places: Tensor, group: ProcessGroup
) -> Tensor:
    """Brings all tokens to all ranks, which have as many each: another way."""
    size, local = len(hidden) * group.size(), len(places) // group.size()
    tokens = gather_in(hidden, 0, size, group)
    place = gather(places[index], 0, size, group)
    token, route = (place // local == group.rank()).nonzero().unbind(1)
    rows = run(tokens[token], place[token, route] - local * group.rank())
    sums = tokens.new_zeros(*place.shape, hidden.shape[-1]).index_put((token, route), rows)
    return (scatter_out(sums, 0, group) * weights.unsqueeze(-1)).sum(1)


TWO_STEPS = Schedule(steps=2, micro_batches=2, clip=0.5)
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
LEVERS = {
    "compiled": FSDP2Config(enable_compile=True, compile_backend="aot_eager"),
    "compiled and checkpointed": FSDP2Config(
        enable_compile=True, compile_backend="aot_eager", activation_checkpointing=True
    ),
    "selective": FSDP2Config(activation_checkpointing="selective", chunked_loss=7),
    "each child checkpointed": FSDP2Config(activation_checkpointing="submodule", reshard_after_forward=True),
    "gradients reduced at once": FSDP2Config(defer_fsdp_grad_sync=False, enable_fsdp2_prefetch=False),
    "another dispatcher": FSDP2Config(expert_dispatcher=f"{__name__}.gather_all"),
    "blocks in one unit": FSDP2Config(fsdp2_min_num_params=10**6, fsdp2_forward_prefetch_depth=2),
}
LONG = ("compiled", "each child checkpointed", "gradients reduced at once", "blocks in one unit", "selective")


@pytest.mark.slow
@pytest.mark.parametrize("lever", with_long(LEVERS, *LONG))
def test_beside(lever: str, pool4: Pool) -> None:
    families = ("qwen3_moe",) if "compiled" in lever else ("qwen3_moe", "deepseek_v3")
    runs = {
        f: Run(sizes={"dp_shard": 4, "ep": 2}, schedule=TWO_STEPS, changes=EIGHT | ROUTER, config=LEVERS[lever])
        for f in families
    }
    check(pool4.run(errors, runs, timeout=100))


@pytest.mark.slow
def test_freeing_to_more_ranks_than_share_experts(pool4: Pool) -> None:
    config = FSDP2Config(reshard_after_forward=2)
    run = Run(sizes={"dp_shard": 4, "ep": 4}, schedule=Schedule(steps=1), changes=EIGHT, config=config)
    check(pool4.run(errors, {"qwen3_moe": run}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("deep_ep.dispatch", "'deep_ep.dispatch' cannot be imported: No module named 'deep_ep'"),
        ("math.pi", "is a float"),
    ],
)
def test_a_dispatcher_that_is_not_there(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP2Config(expert_dispatcher=given)
