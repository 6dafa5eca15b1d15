"""The direction of imports: a room of the package imports only what stands below it, and no public path is lost."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_automodel
from tests.compat.names import COMPAT, INHERITED, own_names, private_attributes, unlisted

PACKAGE = Path(lightning_automodel.__file__).parent

FLOORS = (
    ("_compat",),
    ("distributed", "gradients", "modules", "pages"),
    ("config", "mesh"),
    ("checkpointing", "loading"),
    ("loss", "plans"),
    ("parallel",),
    ("chunked_loss", "megatron", "metrics", "parallelizer"),
    ("finetuning", "strategies"),
    ("__init__", "planner"),
    ("callbacks", "command"),
    ("cli",),
)
"""From the ground up. What stands side by side does not know of each other."""

APART = ("testing",)
"""Knows nothing of the rest but the ground floor, and nothing of the rest knows it."""

PUBLIC: dict[str, str] = {
    "": "FSDP2TPStrategy MegatronFSDPStrategy DDPStrategy FSDP2Config DDPConfig MegatronFSDPConfig parallelize",
    "callbacks": "Health MemoryProfiler RichStepBar TQDMStepBar Throughput TraceProfiler step_bar",
    "chunked_loss": "chunked_linear_cross_entropy",
    "config": "DDPConfig FSDP2Config MegatronFSDPConfig",
    "finetuning": "CausalLM ImageTextDataModule ImageTextLM PreferenceDataModule TextDataModule HuggingFaceExport "
    "WarmupCosine",
    "finetuning.causal_lm": "CausalLM",
    "finetuning.chat": "render_chat",
    "finetuning.data": "TextDataModule token_rows",
    "finetuning.encoding": "Document Encoder",
    "finetuning.export": "HuggingFaceExport",
    "finetuning.loader": "EpochShuffle ResumableLoader",
    "finetuning.preferences": "PreferenceDataModule PairCollator",
    "finetuning.pretrained": "Pretrained check_weights looked_up",
    "finetuning.rows": "Collator RowDataset cut pack",
    "finetuning.schedule": "WarmupCosine",
    "finetuning.sources": "ChatRecord PromptRecord TextRecord expand read_records",
    "finetuning.store": "TokenStore store_key",
    "finetuning.token_loss": "TokenLoss TokenPerplexity TokenWindow",
    "gradients": "clip_grad_norm_ clip_grad_by_total_norm_ get_grad_norm to_local_if_dtensor",
    "loading": "materialize sharded_loading broadcast_weights cast_parameters",
    "loss": "count_hits count_targets cross_entropy entropy gather_logits get_logprobs_from_vocab_parallel_logits "
    "next_tokens top1 top1_accuracy",
    "megatron": "HAVE_MEGATRON_FSDP megatron_fsdp_strategy_parallelize nvfsdp_strategy_parallelize accumulating "
    "clip_grad_norm_",
    "mesh": "DP_CP TP axis build_mesh gloo_in_order resolve_sizes",
    "metrics": "Perplexity TokenAccuracy TokenCounter MeanOverTargets expert_loads",
    "parallelizer": "parallelize fsdp2_strategy_parallelize megatron_fsdp_strategy_parallelize "
    "nvfsdp_strategy_parallelize register_parallel_strategy register_tp_plan ParallelizationStrategy "
    "DefaultParallelizationStrategy PARALLELIZATION_STRATEGIES get_parallelization_strategy validate_tp_mesh "
    "validate_tp_mesh_for_nemotron_nas get_hf_tp_shard_plan translate_to_torch_parallel_style get_lm_ac_layers "
    "apply_fsdp2_sharding_recursively apply_selective_activation_checkpointing unshard_fsdp2_model "
    "import_class_from_path import_classes_from_paths HAVE_MEGATRON_FSDP",
    "strategies": "DDPStrategy FSDP2TPStrategy MegatronFSDPStrategy",
    "strategies.ddp": "DDPStrategy",
    "strategies.fsdp2_tp": "FSDP2TPStrategy",
    "strategies.megatron_fsdp": "MegatronFSDPStrategy",
}
"""Names that users, or YAML files that they saved, import."""


@cache
def rooms() -> list[str]:
    return sorted({path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")})


def floor_of(room: str) -> int:
    return next(floor for floor, names in enumerate(FLOORS) if room in names)


@cache
def imported_rooms(path: Path) -> list[str]:
    return [*_imported_rooms(path)]


def _imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE.name:
                is_room = len(parts) > 1 and parts[1] in rooms()
                yield parts[1] if is_room else "__init__"


def test_every_room_has_a_floor() -> None:
    assert sorted([*(room for floor in FLOORS for room in floor), *APART]) == rooms()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    others = {other for other in imported_rooms(path) if other != room}
    if room in APART:
        assert not others - set(FLOORS[0])
        return
    assert not others & set(APART)
    above = sorted(other for other in others if floor_of(other) >= floor_of(room))
    assert not above, f"{room} stands on floor {floor_of(room)} and imports {above}; see FLOORS"


def rows_of_map() -> dict[str, tuple[str, set[str]]]:
    """Floor and imports of each room, as the table of docs/architecture.md has them."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text().replace("\\", "")
    rows = re.findall(r"^\| ([-\d]+) \| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", text, re.MULTILINE)
    return {room: (floor, set(imports.replace("`", "").split(", "))) for floor, room, imports in rows}


def test_the_map_shows_every_room_and_its_imports() -> None:
    rows = rows_of_map()
    assert sorted(rows) == rooms()
    assert {room: floor for room, (floor, _) in rows.items() if room not in APART} == {
        room: str(floor) for floor, names in enumerate(FLOORS) for room in names
    }
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        unnamed = {*imported_rooms(path)} - {room, "_compat", *rows[room][1]}
        assert not unnamed, f"{path} imports {unnamed}: write it into the line of {room} in docs/architecture.md"


def test_the_map_names_files_that_are_there() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    folders = ("lightning_automodel", "tests", "benchmarks")
    files = [f"/{path.as_posix()}" for folder in folders for path in (PACKAGE.parent / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []


def lines_after_docstring(function: ast.FunctionDef) -> int:
    first = function.body[0]
    start = first.end_lineno if ast.get_docstring(function) is not None else first.lineno - 1
    return (function.end_lineno or 0) - (start or 0)


def test_files_and_functions_fit_on_a_screen() -> None:
    """Pictures in docstrings and the long signatures of a public interface apart."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [name for name, source in sources.items() if len(source.splitlines()) > 350] == []
    functions = (
        (name, node)
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    )
    assert [f"{name}: {f.name}" for name, f in functions if lines_after_docstring(f) > 35] == []


NO_VERBS = ("What", "Of", "Where", "Without", "In", "Inside", "That", "How", "Whether", "Whoever", "As", "For", "From")


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    functions = (
        (path.name, node.name, ast.get_docstring(node) or "")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    assert [f"{file}: {name}" for file, name, text in functions if text.partition(" ")[0] in NO_VERBS] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_public_paths(module: str) -> None:
    found = importlib.import_module(".".join(filter(None, (PACKAGE.name, module))))
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []


def test_every_private_name_of_compat_has_a_test() -> None:
    assert unlisted() == set(), "add them to ATTRIBUTES of tests/compat/names.py, under what they are attributes of"


def test_private_names_of_others_are_in_compat_only() -> None:
    outside = {path: private_attributes(path) for path in PACKAGE.rglob("*.py") if path not in COMPAT}
    own = own_names() | INHERITED
    assert {str(path): names - own for path, names in outside.items() if names - own} == {}
