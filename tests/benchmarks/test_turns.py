"""Runs of a benchmark take a step each in turn, and an error in one ends the benchmark."""

from collections.abc import Callable

import pytest

from benchmarks._turns import Turns


def test_a_step_is_taken_when_its_turn_comes() -> None:
    taken: list[str] = []

    def way(name: str) -> Callable[[Turns], None]:
        return lambda turns: taken.extend(f"{name}{batch}" for batch in turns)

    first, second = Turns(1, 5), Turns(2, 5)
    first.start(way("a"))
    second.start(way("b"))
    assert taken == []
    for turns in (first, second, first, first):
        turns.go()
    assert taken == ["a1", "b2", "a1", "a1"]
    assert (len(first.seconds), len(second.seconds)) == (3, 1)
    assert len(first) == 6


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_is_raised_to_who_gives_turns(steps: int) -> None:
    def fails(turns: Turns) -> None:
        for i, _ in enumerate(turns):
            if i == steps:
                raise KeyError("of this way")

    turns = Turns(None, 3)
    turns.start(fails)
    for _ in range(steps):
        turns.go()
    with pytest.raises(KeyError, match="of this way"):
        turns.go()
    ends = Turns(None, 3)
    with pytest.raises(ZeroDivisionError):
        ends.start(lambda _: 1 // 0)
