"""Covering arrays: few rows in which every pair of values of two columns stands together."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]
"""Two columns with a value each."""


def possible_pairs(columns: Mapping[str, Sequence[str]], refused: Sequence[Row]) -> set[Pair]:
    """All pairs of values, without those that are ``refused``."""
    pairs = {
        frozenset({(one, a), (two, b)})
        for one, two in combinations(columns, 2)
        for a, b in product(columns[one], columns[two])
    }
    return pairs - {frozenset(row.items()) for row in refused}


def covering_rows(columns: Mapping[str, Sequence[str]], refused: Sequence[Row], tries: int = 20) -> list[Row]:
    """The shortest of several arrays, each drawn greedily; the same in every process.

    Args:
        columns: values by column; any value must go with some value of every other column.
        refused: pairs of values that must not stand in a row.
        tries: arrays that are drawn.
    """
    return min((_drawn(columns, refused, random.Random(seed)) for seed in range(tries)), key=len)


def pairs_in(row: Row) -> set[Pair]:
    """The pairs that stand in ``row``."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def _drawn(columns: Mapping[str, Sequence[str]], refused: Sequence[Row], generator: random.Random) -> list[Row]:
    left = possible_pairs(columns, refused)
    impossible = {frozenset(row.items()) for row in refused}
    order = sorted(left, key=sorted)
    generator.shuffle(order)
    rows: list[Row] = []
    while left:
        row = dict(next(pair for pair in order if pair in left))
        for name in generator.sample(list(columns), len(columns)):
            if name not in row:
                found = {
                    value: {frozenset({(name, value), chosen}) for chosen in row.items()} for value in columns[name]
                }
                fitting = [value for value, pairs in found.items() if not pairs & impossible]
                row[name] = max(fitting, key=lambda value: len(found[value] & left))
        left -= pairs_in(row)
        rows.append({name: row[name] for name in columns})
    return rows
