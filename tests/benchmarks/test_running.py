"""Benchmarks that run in turn: in one process, and one that fails does not keep the others from running."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import _performance
from benchmarks.__main__ import main
from benchmarks._nursery import shared_nursery
from lightning_automodel.testing.pool import Nursery

found: list[tuple[str, list[str], Nursery]] = []


def measure() -> None:
    with shared_nursery() as nursery:
        found.append((sys.argv[0], sys.argv[1:], nursery))


def fail() -> None:
    measure()
    raise ValueError("no such device")


def leave() -> None:
    measure()
    sys.exit("leave out one")


def test_they_share_ranks_and_fail_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mains = {"lora": fail, "load": leave, "peers": measure}
    monkeypatch.setattr(_performance, "load", lambda name: SimpleNamespace(main=mains.get(name, measure)))
    found.clear()
    before = sys.argv
    with pytest.raises(SystemExit) as ending:
        main(["lora", "load", "peers", "--smoke"])
    assert ending.value.code == 1
    assert sys.argv == before
    assert [(name, options) for name, options, _ in found] == [
        ("benchmarks.lora", ["--smoke"]),
        ("benchmarks.load", ["--smoke"]),
        ("benchmarks.peers", ["--smoke"]),
    ]
    assert len({id(nursery) for *_, nursery in found}) == 1
    said = capsys.readouterr()
    assert "failed: lora, load" in said.out
    assert "ValueError: no such device" in said.err
    assert "leave out one" in said.err


def test_alone_each_has_its_own() -> None:
    found.clear()
    measure()
    measure()
    (*_, first), (*_, second) = found
    assert first is not second
