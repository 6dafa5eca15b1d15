"""The ladder on a GPU, without one: a row that fails, hangs or does not fit costs itself only."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as ladder
from benchmarks.gpu import runner
from benchmarks.gpu.kept import Kept
from benchmarks.gpu.measure import Clock
from benchmarks.gpu.plan import Planned, read
from benchmarks.gpu.rows import ROWS, Row, smallest

MEASURED = {"seconds": 0.5, "low": 0.4, "high": 0.6, "peak": 3 * 2**30}
PLAYED = f"""
import json, subprocess, sys, time
name = json.loads(sys.stdin.readline())["row"]["name"]
if name == "falls":
    sys.exit("RuntimeError: no memory")
if name == "leaves":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if name == "hangs":
    time.sleep(600)
print("of a library")
print(json.dumps({{"error": "OutOfMemoryError: a | b"}} if name == "refuses" else {MEASURED!r}))
"""


def rows(*names: str) -> list[Row]:
    return [Row(model="Llama-3.2-1B", name=name, length=32) for name in names]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, "-c", PLAYED])
    monkeypatch.setattr(runner, "flops_of", lambda *_: 1e12)


def test_a_row_costs_itself_only(played: None, tmp_path: Path) -> None:
    chosen = rows("runs", "falls", "hangs", "leaves", "refuses", "again")
    measuring = runner.Runner(chosen, smoke=True, seconds=60, folder=tmp_path, timeout=2.0)
    found = [measuring.run(row) for row in chosen]
    measuring.close()
    ran = {"length": 32, "flops": 1e12} | MEASURED
    assert [found[i] for i in (0, 3, 5)] == [ran] * 3
    assert [found[i]["error"] for i in (1, 2, 4)] == [
        "ended with 1: RuntimeError: no memory",
        "took more than 2 s",
        "OutOfMemoryError: a | b",
    ]
    assert "RuntimeError: no memory" in (tmp_path / "errors.log").read_text()


def test_time_that_is_over(played: None) -> None:
    chosen = rows("runs", "again")
    measuring = runner.Runner(chosen, smoke=True, seconds=-6, folder=None)
    kept = Kept(None)
    ladder.measure(chosen[0], measuring, kept)
    assert kept.found == {chosen[0].key: {"error": "not measured: -0.1 minutes were over"}}
    measuring.close()


def test_rows_are_written_as_they_come(played: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    chosen = rows("runs", "refuses", "again")
    monkeypatch.setattr(ladder, "smallest", lambda _: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--out", str(tmp_path / "out")])
    run, calls = runner.Runner.run, iter(chosen)
    monkeypatch.setattr(
        ladder.Runner, "run", lambda self, row: run(self, row) if next(calls).name != "again" else interrupted()
    )
    with pytest.raises(KeyboardInterrupt):
        ladder.main()
    page, figures = (tmp_path / "out" / name for name in ("gpu_ladder.md", "gpu.json"))
    assert "| runs | 64 | 500.0 (400.0-600.0) | 2.0 |  | 3.0 |  |  |" in page.read_text()
    assert [row[0] for row in json.loads(figures.read_text())["tables"][0]["rows"]] == ["runs", "refuses"]
    begun: list[str] = []
    monkeypatch.setattr(ladder.Runner, "run", lambda self, row: begun.append(row.name) or run(self, row))
    ladder.main()  # goes on where it was interrupted
    assert begun == ["again"]
    assert [row[0] for row in json.loads(figures.read_text())["tables"][0]["rows"]] == ["runs", "refuses", "again"]


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kept(tmp_path).add("row", MEASURED)
    assert Kept(tmp_path).found == {"row": MEASURED}
    monkeypatch.setattr("benchmarks.gpu.kept.name_of_device", lambda: "NVIDIA H200")
    with pytest.raises(SystemExit, match=r"was measured on .*'CPU'.* give another --out"):
        Kept(tmp_path)


def test_a_page_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr("benchmarks.gpu.kept.name_of_device", lambda: "NVIDIA H200")
        there.setattr("benchmarks.gpu.kept.configuration", lambda: {"machine": "that one"})
        Kept(tmp_path).add(ROWS[0].key, MEASURED | {"length": 8192, "flops": 4.9e14})
    page = ladder.Page("gpu_ladder.md", "gpu")
    page.move(tmp_path)
    ladder.write_page(page, tmp_path)
    text = page.path.read_text()
    assert "NVIDIA H200, torch" in text
    assert f"| {ROWS[0].name} | 16384 | 500.0 (400.0-600.0) | 980.0 | 99.0% | 3.0 |" in text
    assert f"| {ROWS[1].name} | not measured |" in text
    assert json.loads((tmp_path / "gpu.json").read_text())["machine"] == "that one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--page", "nowhere"], "no rows.json is there"), (["--smoke", "--only", "70B"], "no row's name has such a part")],
)
def test_mistakes_end_before_anything_is_written(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    before = (ladder.Page("gpu_ladder.md", "gpu")).path.read_text()
    with pytest.raises(SystemExit, match=message):
        ladder.main()
    assert ladder.Page("gpu_ladder.md", "gpu").path.read_text() == before


def test_what_does_not_fit_is_said() -> None:
    (row,) = rows("runs")
    text = ladder.line(row, {"error": ladder.does_not_fit(Planned(gib=150, speed=1), 139 * 2**30)}, None, None)
    assert text == "| runs | does not fit: 150 GiB planned, 139 GiB there |  |  |  |  |  |  |"
    assert ladder.does_not_fit(Planned(gib=130, speed=1), 139 * 2**30) == ""


def test_each_row_is_planned() -> None:
    assert {row.key for row in ROWS} == set(read())
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_the_smallest_form_has_every_lever() -> None:
    used = {name for row in smallest(ROWS) for name in row.fields}
    assert used >= {"activation_checkpointing", "chunked_loss", "enable_compile", "float8"}
    assert {"grouped_mm"} <= {row.experts for row in smallest(ROWS)}


def test_enough_steps_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, steps in ((0.1, 11), (5.0, 6)):
        clock, now = Clock(), iter(i * seconds for i in range(100))
        monkeypatch.setattr("benchmarks.gpu.measure.time.perf_counter", lambda now=now: next(now))
        while not clock.tick():
            pass
        assert len(clock.steps()) == steps


# ---- a machine without a network -------------------------------------------------------------------------------------

TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
}


def needed_by(*texts: str) -> set[str]:
    """All packages that these requirements ask for, themselves included."""
    found, left = set[str](), [Requirement(text) for text in texts]
    while left:
        asked = left.pop()
        name = canonicalize_name(asked.name)
        if name in found and not asked.extras:
            continue
        found.add(name)
        below = [Requirement(text) for text in metadata.requires(name) or []]
        extras = asked.extras or {""}
        left += [r for r in below if r.marker is None or any(r.marker.evaluate({**TARGET, "extra": e}) for e in extras)]
    return found


PINNED = dict(
    line.split("==") for line in (Path(__file__).parents[2] / "constraints.txt").read_text().split() if "==" in line
)


@pytest.mark.skipif(
    any(metadata.version(name) != PINNED[name] for name in ("lightning", "torchmetrics", "transformers")),
    reason="the wheels are those of constraints.txt, and other versions need other packages",
)
def test_wheels_are_all_that_is_needed_beside_torch() -> None:
    lines = (Path(ladder.__file__).parent / "wheels.txt").read_text().splitlines()
    listed = {Requirement(line).name for line in lines if not line.startswith("#")}
    own = [text for text in metadata.requires("lightning_automodel") or [] if "extra ==" not in text]
    optional = ("peft", "torchao", "megatron-fsdp", "einops", "pytest", "pytest-timeout")
    needed = needed_by(*own, *optional)
    assert needed - needed_by("torch", "fsspec[http]") <= listed  # a file system that no test opens
    assert listed - {"liger-kernel"} <= needed
