"""Terms of one sum have one gradient, which autograd hands to each: what is added to it belongs to one of them."""

from functools import partial

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE
from tests.plans.test_partial_sums import SUMS, Composed, build
from tests.support.comparison import compare


def error() -> tuple[float, str]:
    """Runs on each rank; the gradients of the first micro-batch wait, and those of the second are added to them."""
    config = FSDP2Config(tp_plan=SUMS[Composed])
    return compare(partial(build, Composed), {"dp_shard": 2, "tp": 2}, 4, SCHEDULE, config).largest


def test_gradients_that_wait_for_their_reduction(pool4: Pool) -> None:
    for found, name in pool4.run(error):
        assert found <= BOUND, name
