"""The documentation as a site: every link and name in it is alive, every page has its place, messages are ours."""

import ast
import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

from tests.support import browser
from tests.test_rooms import PUBLIC

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = (ROOT / "mkdocs.yml").read_text()
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def nav() -> set[str]:
    return set(re.findall(r"[\w/]+\.md$", SITE.partition("\nnav:")[2], re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """As Python-Markdown makes them of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), target


def test_every_page_has_a_place() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert pages - nav() == set(), "add them to nav in mkdocs.yml"
    assert nav() - pages == set()


def test_nothing_is_loaded_from_a_network() -> None:
    config = yaml.safe_load(SITE)
    assert config["theme"]["font"] is False
    assert config["strict"] is True
    assert not [name for name in config["extra_javascript"] + config["extra_css"] if "//" in name]


def named() -> set[str]:
    """The names of the reference, as the hook of mkdocs spells them out."""
    return set(runpy.run_path(str(DOCS / "_site" / "hooks.py"))["documented"]())


def test_the_reference_has_every_public_name() -> None:
    """Of the modules that users import; a name that two of them offer stands once."""
    for name in named():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    shown = {name.rpartition(".")[2] for name in named()}
    doors = [module for module in PUBLIC if "." not in module]
    for module in doors:
        found = importlib.import_module(".".join(filter(None, ("lightning_automodel", module))))
        is_door = module != "config"  # which offers other rooms more than users
        offered = set(getattr(found, "__all__", ())) if is_door else set(PUBLIC[module].split())
        assert offered - shown == set(), f"add them to docs/api/, those of {module}"


def literals() -> list[str]:
    """All texts in the sources, with a blank in the place of values."""
    found = []
    for path in (ROOT / "lightning_automodel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_troubleshooting_are_ours() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    texts = literals()
    for message in rows:
        fragments = [part.strip(" :;,()") for part in message.split("...") if len(part.strip(" :;,()")) > 2]
        assert fragments, message
        for fragment in fragments:
            assert any(fragment in text for text in texts), f"{fragment!r} of {message!r}"


@pytest.mark.skipif(browser.find() is None, reason="there is no Chromium on this machine")
def test_the_page_of_families_has_a_field(tmp_path: Path) -> None:
    table = "<table><thead><tr><th>family</th></tr></thead><tbody>{}</tbody></table>"
    rows = "".join(f"<tr><td>{name}</td></tr>" for name in ("llama", "qwen3", "qwen3_moe"))
    script = f"<script>{(DOCS / 'assets' / 'filter.js').read_text()}</script>"
    file = tmp_path / "page.html"
    tables = table.format(rows) + table.format("<tr><td>mamba</td></tr>")
    file.write_text(f"<article><h2>a</h2>{tables}</article>{script}")
    found = browser.dump(f"file://{file}#family=qwen3%20moe")
    assert "<tr><td>qwen3_moe</td></tr>" in found
    assert found.count('<tr hidden=""') == 3
    assert found.count('<table hidden=""') == 1
    assert "<output>1 of 4 rows</output>" in found
    assert "hidden" not in browser.dump(f"file://{file}").partition("<script>")[0]


def test_pictures_are_small() -> None:
    assert [path.name for path in (DOCS / "images").glob("*.png") if path.stat().st_size > 150_000] == []
