"""The page of a plan: it shows the figures of the plan, and loads nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_automodel import FSDP2Config
from lightning_automodel.cli import main
from lightning_automodel.mesh import MeshSizes, resolve_sizes
from lightning_automodel.planner.hardware import HARDWARE
from lightning_automodel.planner.html import groups_of, plan_page
from lightning_automodel.planner.plan import Plan, plan
from lightning_automodel.planner.play import Run
from lightning_automodel.planner.search import Rejected
from lightning_automodel.planner.watch import PHASES
from tests.support.families import tiny_config
from tests.support.markup import Page, is_alone

H100 = HARDWARE["h100"]


@pytest.fixture(scope="module")
def found() -> Plan:
    run = Run(sizes=resolve_sizes(16, tp=2), config=FSDP2Config(sequence_parallel=True), sequence_length=64)
    return plan(tiny_config("llama"), run, H100)


def test_the_page_shows_the_plan(found: Plan) -> None:
    page = Page(plan_page(replace(found, warnings=["<b>tp</b>"])))
    assert is_alone(page)
    assert "<b>tp</b>" in page.text
    assert f"{found.estimate.speed:,.0f}" in page.text
    rows = {tuple(row[:3]): row for row in page.rows["collectives"]}
    assert len(rows) == len(found.watched.volume)
    for key, volume in found.watched.volume.items():
        row = rows[key.kind, key.axis, key.phase]
        assert row[3:5] == [f"{found.watched.counts[key]:,}", f"{volume:,}"]
    (*_, total) = page.rows["memory"]
    assert total[1:] == [_gib(found.watched.peaks[phase].total()) for phase in PHASES]
    assert len(page.rows["parameters"]) == len(found.watched.parameters)


def _gib(size: int) -> str:
    return "< 0.01" if size < 0.01 * 2**30 else f"{size / 2**30:.2f}"


def test_the_search_stands_in_a_table(found: Plan) -> None:
    slower = replace(found, run=replace(found.run, micro_batch=2))
    page = Page(plan_page(found, [found, slower], [Rejected(found.run, "tp=3 <does> not fit")]))
    first, second, last = page.rows["search"]
    assert first[:6] == ["1", "2", "8", "yes", "no", "1"]  # no cp, no dp_replicate: they are 1 in all rows
    assert second[5] == "2"
    assert last[-1] == "tp=3 <does> not fit"
    assert "no layout fits" in Page(plan_page(None, [], [Rejected(found.run, "why")])).text


def groups(sizes: MeshSizes, devices: int = 8) -> dict[str, dict[int, tuple[int, bool]]]:
    return {
        group.axis: {rank: (colour, own) for node in group.nodes for rank, colour, own in node.ranks}
        for group in groups_of(sizes, devices)
    }


def test_the_picture_of_the_mesh() -> None:
    """16 ranks, tp=2, cp=2, dp_shard=4, and ep=2 of dp_shard x cp: ranks r and r + 2."""
    found = groups(resolve_sizes(16, tp=2, cp=2, ep=2))
    assert set(found) == {"dp_shard", "cp", "tp", "ep"}
    for axis, own in (("tp", [0, 1]), ("cp", [0, 2]), ("ep", [0, 2]), ("dp_shard", [0, 4, 8, 12])):
        assert [rank for rank, (_, mine) in found[axis].items() if mine] == own
    colours = [colour for colour, _ in found["dp_shard"].values()]
    assert colours == [1, 2, 3, 4] * 4
    assert [colour for colour, _ in found["tp"].values()] == [c for c in range(1, 9) for _ in range(2)]


def test_a_large_mesh_shows_the_nodes_of_rank_0() -> None:
    (replicas, shards) = groups_of(resolve_sizes(16384, dp_replicate=2), 8)
    shown = [node.index for node in replicas.nodes if not node.skipped]
    assert shown == [0, 1, 2, 3, 4, 1024]
    assert sum(node.skipped or 1 for node in replicas.nodes) == 2048
    assert shards.size == 8192
    assert "rank 0 with 8192" in replicas.text


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    main(
        ["plan", f"--model={tmp_path / 'model'}", "--world=8", "--tp=2", "--seq=64", f"--html={tmp_path / 'plan.html'}"]
    )
    assert "The page is written to" in capsys.readouterr().out
    assert is_alone(Page((tmp_path / "plan.html").read_text()))
