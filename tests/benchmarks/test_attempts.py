"""What a peer cannot do is a line of a table, in the exception's own words; a missing environment is named."""

import re
import sys

import pytest

from benchmarks import _attempts, _losses, _peer_loads, _peers
from benchmarks._attempts import LONGEST, by_command, by_nemo, error_of, in_a_line

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in f
    raise ValueError("inner: first | second")
some.library.exceptions.MisconfigurationException: {words}
    and a line of its own: with a colon
"""


def test_an_error_is_its_own_words() -> None:
    assert error_of(TRACEBACK.format(words="a | b")) == "MisconfigurationException: a / b"
    assert error_of("") == "no output"
    assert error_of("killed\n") == "killed"


def test_an_error_is_one_readable_line() -> None:
    long = error_of(TRACEBACK.format(words="words " * 40))
    assert len(long) <= LONGEST
    assert re.fullmatch(r"MisconfigurationException:( words)+ \.\.\.", long)
    assert in_a_line("short\nmore") == "short"


@pytest.mark.long
def test_a_command_that_fails_gives_its_error() -> None:
    found = by_command("benchmarks._losses", "no JSON", ranks=1)
    assert found["error"].startswith("JSONDecodeError: Expecting value")


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attempts, "NEMO", _attempts.ROOT / "nowhere")
    assert "nemo_automodel" not in sys.modules
    assert by_nemo("benchmarks._losses", "{}") == _attempts.WITHOUT_NEMO
    assert _attempts.versions_of_nemo() == ""


def test_every_way_has_its_cases() -> None:
    tp, data = _peers.ways_for("tp"), _peers.ways_for("full")
    assert set(tp) | set(data) == set(_peers.WAYS)
    assert set(_peers.WITHOUT_TP) == set(_peers.WAYS) - set(tp)
    assert _peers.NEMO in tp
    assert _peer_loads.NEMO in _peer_loads.WAYS
    assert _losses.NEMO in _losses.PEERS
