"""Every block of the pages does what it shows: Python runs, YAML configures the command, command lines are understood.

    python, diff   runs on two ranks, page by page, in a folder as the quickstart leaves it; of a diff what it adds
    yaml           the command takes it as a configuration, and its values are in what is printed
    sh             `make first-hour` runs each line, or `NOT_RUN` (tests/support/placeholders.py) says why it does not
    console        shows commands that are run
    text           is printed by us

A block that is no program stands in a frame, ``tests/docs/frames/PAGE.LANGUAGE``: what comes before and after it.
"""

import functools
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pictures.terminal import RECORDINGS
from lightning_automodel import cli
from lightning_automodel.testing.pool import Pool
from tests.docs.test_site import literals
from tests.support.documents import ROOT, Block, blocks, command_lines, pages, unbound
from tests.support.marks import OLD_FSDP2
from tests.support.placeholders import NOT_RUN, command_read_as, commands_that_run, read_as, shell

FRAMES = Path(__file__).parent / "frames"
MARK = "# ---- the block ----\n"
EXECUTED = ("python", "diff")
BLOCKS = [block for page in pages() for block in blocks(page)]
EXECUTED_PAGES = list(dict.fromkeys(block.page for block in BLOCKS if block.language in EXECUTED))
YAML = [block for block in BLOCKS if block.language == "yaml"]
COMMANDS = [f"{block.place} {line}" for block, line in commands_that_run(shell())]
OF_THE_TRAINER = ("fit", "validate", "test", "predict")
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_has_a_language_that_is_looked_after(block: Block) -> None:
    assert block.language in (*EXECUTED, "yaml", "sh", "console", "text"), block.place


def test_no_fence_is_overlooked() -> None:
    for page in pages():
        fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith(("```", "~~~"))]
        assert len(fences) == 2 * len(blocks(page)), f"{page.name}: a fence that is indented, or of another form"


# ---- Python ----------------------------------------------------------------------------------------------------------


def program(block: Block) -> str:
    """What the block asks a reader to run."""
    if block.language == "diff":
        return "".join(line[2:] for line in block.text.splitlines(keepends=True) if line.startswith("+"))
    return block.text


def frame(block: Block) -> tuple[str, str]:
    """What stands before and after the block."""
    path = FRAMES / f"{block.page.stem}.{block.language}"
    before, _, after = (path.read_text() if path.exists() else MARK).partition(MARK)
    return before, after


def run_blocks(found: list[Block], workspace: Path) -> int:
    """Runs on each rank; an error shows the line of the page."""
    os.chdir(workspace)
    for block in found:
        names: dict[str, Any] = {"__name__": "__main__"}
        before, after = frame(block)
        text = "\n" * block.line + program(block)
        for part, place in ((before, "frame"), (text, str(block.page)), (after, "frame")):
            exec(compile(read_as(part), place, "exec"), names)
    return len(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", EXECUTED_PAGES, ids=lambda page: page.name)
def test_python_runs(pool2: Pool, workspace: Path, page: Path) -> None:
    if OLD_FSDP2 and page.name == "planner.md":
        pytest.skip("of 32 rows over 256 ranks torch 2.11 asks tensors for values, which those of the planner have not")
    found = blocks(page, *EXECUTED)
    for block in found:
        assert unbound("".join((frame(block)[0], program(block), frame(block)[1]))) == set(), (
            f"{block.place} uses names that nothing makes: complete it, or add {FRAMES.name}/{page.stem}.python"
        )
    ran = pool2.run(run_blocks, found, workspace, trainer=True, timeout=300)
    assert ran == [len(found)] * 2


def test_every_frame_has_its_blocks() -> None:
    of_blocks = {f"{block.page.stem}.{block.language}" for block in BLOCKS}
    assert {path.name for path in FRAMES.iterdir()} - of_blocks == set()


# ---- YAML ------------------------------------------------------------------------------------------------------------


def missing(wanted: Any, found: Any, key: str = "") -> list[str]:
    """Keys of ``wanted`` that ``found`` has not, or with another value."""
    if isinstance(wanted, Mapping):
        found = found if isinstance(found, Mapping) else {}
        return [m for name, value in wanted.items() for m in missing(value, found.get(name), f"{key}.{name}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [m for i, pair in enumerate(zip(wanted, found, strict=True)) for m in missing(*pair, f"{key}.{i}")]
    return [] if wanted == found else [f"{key}: {found!r} is not {wanted!r}"]


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.place)
def test_yaml_configures_the_command(block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(block.text)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["fit", "--model.model=path/or/name", f"--config={tmp_path / 'run.yaml'}", "--print_config"])
    assert missing(yaml.safe_load(block.text), yaml.safe_load(capsys.readouterr().out)) == []


# ---- command lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", COMMANDS)
def test_the_command_understands_its_lines(
    place: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the lines do is seen in `make first-hour`."""
    monkeypatch.chdir(workspace)
    (workspace / "run.yaml").write_bytes((ROOT / "examples" / "full.yaml").read_bytes())
    name, *given = shlex.split(re.sub(r" > \S+", "", command_read_as(place.partition(" ")[2])))
    if name != "lightning-automodel":
        assert name == "python", "the module is there, which tests/docs/test_pages.py looks at"
    elif given[0] in OF_THE_TRAINER:
        with pytest.raises(SystemExit, match="0"):
            cli.main([*given, "--print_config"])
    elif given[0] in cli._TOOLS:
        done: list[str] = []
        tools = {key: functools.wraps(tool)(lambda *a, **k: done.append("")) for key, tool in cli._TOOLS.items()}
        monkeypatch.setattr(cli, "_TOOLS", tools)
        cli.run_tool(given)
        assert done
    else:
        assert given[0] in cli._COMMANDS


def test_a_line_that_does_not_run_is_there_and_says_why() -> None:
    lines = [line for block in shell() for line in command_lines(block)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []
    assert all(NOT_RUN.values())


def test_what_consoles_show_is_run() -> None:
    run = {line for commands in RECORDINGS.values() for line in commands}
    run |= {line for _, line in commands_that_run(shell())}
    for block in BLOCKS:
        if block.language == "console":
            shown = re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)
            assert shown, block.place
            assert set(shown) <= run, block.place


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_a_text_is_no_command() -> None:
    for block in BLOCKS:
        if block.language == "text":
            assert not re.search(r"^\$? ?(lightning-automodel [a-z]+ |python |pip |make )", block.text, re.MULTILINE)


def test_errors_that_are_shown_are_ours() -> None:
    """A message in the sources, with values in its gaps, is in each of them."""
    patterns = [
        ".*?".join(map(re.escape, text.split("\0"))) for text in literals() if len(text.replace("\0", "").strip()) > 12
    ]
    for block in BLOCKS:
        for line in block.text.splitlines() if block.language == "text" else ():
            if re.match(r"lightning-automodel: error: |\w+Error: ", line):
                assert any(re.search(pattern, line) for pattern in patterns), f"{block.place}: {line}"
