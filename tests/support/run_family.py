"""Runs one family on every rank, for the benchmark and the tests."""

from functools import partial

from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model


def run(family, sizes, world, micro, steps=1, **changes):
    d = compare(partial(tiny_model, family, **changes), sizes, world, Schedule(steps=steps, micro_batches=micro))
    return {"largest": d.largest, "worst": d.worst}
