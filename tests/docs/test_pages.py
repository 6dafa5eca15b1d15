"""Pages say what is there: code compiles, imports exist, commands name what is there, figures stand on their pages."""

import ast
import importlib
import inspect
import re

import pytest

from lightning_automodel import (
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2TPStrategy,
    MegatronFSDPConfig,
    MegatronFSDPStrategy,
    callbacks,
    finetuning,
)
from tests.support.documents import ROOT, Block, blocks, command_lines, links, pages

CODE = [block for page in pages() for block in blocks(page, "python")]
SHELL = [block for page in pages() for block in blocks(page, "sh")]


def test_links_of_the_list_for_tools_lead_somewhere() -> None:
    assert [link for link in links(ROOT / "llms.txt") if not (ROOT / link).exists()] == []


def test_the_list_for_tools_has_every_page_and_example() -> None:
    listed = set(links(ROOT / "llms.txt"))
    docs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    ignored = {"__init__.py", "chat.jinja", "quickstart.yaml", "vision.py", "records.py", "held_out_loss.py"}
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*")} - {
        f"examples/{x}" for x in ignored
    }
    assert sorted((docs | examples) - listed) == []


@pytest.mark.parametrize("block", CODE, ids=lambda block: block.place)
def test_code_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_commands_name_files_and_modules_that_are_there(block: Block) -> None:
    for command in command_lines(block):
        for module in re.findall(r"python -m ((?:examples|benchmarks|tests)[\w.]*)", command):
            assert importlib.util.find_spec(module) is not None, command
        for name in re.findall(r"(?:^|[ =])((?:examples|docs|tests)/[\w./]+)", command):
            assert (ROOT / name).exists(), command


def test_modules_and_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in pages():
        text = page.read_text()
        for module in re.findall(r"python -m ((?:examples|benchmarks|tests)[\w.]*\w)", text):
            assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
        named = set(re.findall(r"`make ([a-z-]+)", text))
        assert named <= targets, page.name


def arguments_on(page: str) -> set[str]:
    """Names that a page has in backticks, alone or in a command; ``activation_*`` is the start of several."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text())
    return {name for span in spans for name in re.findall(r"[\w.]+\*?", span)}


DOCUMENTED = {
    "reference.md": (
        *(FSDP2TPStrategy, FSDP2Config, DDPStrategy, DDPConfig, MegatronFSDPStrategy, MegatronFSDPConfig),
        *(getattr(callbacks, name) for name in callbacks.__all__),
    ),
    "command.md": tuple(getattr(finetuning, name) for name in finetuning.__all__),
}


@pytest.mark.parametrize("page", DOCUMENTED)
def test_every_argument_stands_on_its_page(page: str) -> None:
    known = arguments_on(page)
    starts = tuple(name[:-1] for name in known if name.endswith("_*"))
    for owner in DOCUMENTED[page]:
        names = set(inspect.signature(owner).parameters)
        lacking = {name for name in names - known if not (starts and name.startswith(starts))}
        assert not lacking, f"{owner.__name__}: {lacking}"


def test_figures_of_the_first_page_stand_on_the_pages_that_it_names() -> None:
    text = (ROOT / "README.md").read_text()
    overhead, loading = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("overhead", "loading"))
    families, peers, others = (
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("families", "peers_exactness", "coming_from")
    )
    shown = re.findall(r"\d+ of \d+|\d\.\d+", text[text.index("| | here") : text.index("Measured on CPU")])
    assert len(shown) >= 8
    groups = re.findall(r"^tp=2: (\d+) of (\d+) exact; tp=2, 2 micro", families, re.MULTILINE)
    exact, compared = (sum(map(int, column)) for column in zip(*groups, strict=True))
    families += f"{exact} of {compared}" + peers + others
    rounded = [f"{float(x):.1f}" for x in re.findall(r"\d+\.\d+", overhead)]
    for figure in shown:
        assert figure in families or figure in loading or figure in overhead or figure in rounded, figure
