"""Compares placements and collectives with those that the oracle of the tests derives, family by family."""

from benchmarks.exactness.results import Family
from lightning_automodel.testing.pool import Nursery, Pool, PoolTimeout, RankFailed
from tests.support.run_oracle import Verdict, verdicts


def check(nursery: Nursery, families: dict[str, Family]) -> str:
    """One line of totals over the families that have a plan; prints what does not agree."""
    pool = Pool(nursery, 2)
    planned = [name for name, family in families.items() if family.plan]
    found = {name: _ask(pool, name) for name in planned}
    disagreeing = [name for name, verdict in found.items() if verdict is None or not verdict.agrees]
    for name in disagreeing:
        print(f"oracle: {name:28} {found[name] or 'failed'}", flush=True)
    parameters = sum(verdict.parameters for verdict in found.values() if verdict)
    exceptions = f"; not in {', '.join(disagreeing)}" if disagreeing else ""
    return (
        f"An oracle derives gradient placements and collectives from a forward pass alone (`tests/support/oracle.py`): "
        f"for {parameters} whole parameters and for all collectives it agrees with the static layout in "
        f"{len(found) - len(disagreeing)} of {len(found)} families{exceptions}."
    )


def _ask(pool: Pool, name: str) -> Verdict | None:
    try:
        return pool.run(verdicts, [name], timeout=120)[0][name]
    except (RankFailed, PoolTimeout):
        return None
