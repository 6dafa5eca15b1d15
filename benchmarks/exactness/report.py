"""Writes the tables of docs/families.md from the results."""

import math
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from benchmarks.exactness.columns import COLUMNS, EXTRA, MAIN, Column
from benchmarks.exactness.results import BAR, FINE_BAR, Cell, Family, Store
from tests.support.families import causal_families, image_text_families

INTRODUCTION = f"""# Families

Is a model on a mesh the model that the user asked for? For every family of transformers that reads text, or text and
images, a tiny model of the real class is saved, read on one process and on a mesh of CPU ranks, and trained on both.
All that a step produces is compared: loss, gradient norm, every gradient, and every parameter after the steps (SGD,
which shows errors of scale that Adam hides).

- **exact**: every relative error (in the 2-norm, tensor by tensor) is at most {BAR:.0e} in float32.
- **exact in float64**: it is larger in float32, but at most {FINE_BAR:.0e} when the same comparison is made in float64:
  what differs is rounding. Recurrent mixers and routers that choose between near-equal experts amplify it.
- weights read and written: bit by bit. A model with random numbers in all tensors is saved by plain transformers and
  read by `from_pretrained` on tp=2, dp_shard=2, dp_shard=2 x tp=2 and dp_shard=4; expected is what plain
  `from_pretrained` reads. It is written again from the shards for plain `from_pretrained`, and goes as a checkpoint
  from one layout to another. The same with bfloat16 files that are read as float32 and written as bfloat16.
- **differs**, **fails**: the last column says what and why. A dash: the column does not apply.

The models have two layers, width 96, four heads with two key/value heads, and a vocabulary of 128. Where a model reads
images, every other micro-batch holds some, and not the same ones on all data ranks. With sequence parallelism and with
the chunked loss there are two micro-batches with padding, and an odd number of tokens, which tp does not divide; with
cp as well, and positions of packed documents begin anew. With LoRA, adapters of rank 3 on all linear layers
(`target_modules="all-linear"`) are added by peft to the sharded model; the base is frozen, every factor compared.
Under tp, blocks that no plan of the model's own names are split by
[the names of their layers](plans.md#a-plan-from-names).

Written by `python -m benchmarks.exactness`, which compares what has no result yet; `--family llama`,
`--columns tp mesh`, `--no-resume` and `--oracle` choose.
"""


def write(store: Store, path: Path) -> None:
    """The whole document."""
    parts = [INTRODUCTION, configuration(store), *_main_tables(store.families), *_extra_tables(store.families)]
    if store.oracle:
        parts.append(f"## The oracle\n\n{store.oracle}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts))


def configuration(store: Store) -> str:
    """Say with what the results were found, and how long that took."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    cells = [c for family in store.families.values() for key, c in family.cells.items() if COLUMNS[key].run]
    older = sum(not cell.from_files for cell in cells)
    remark = f" {older} of {len(cells)} comparisons of a step began with a model in memory." if older else ""
    return (
        f"Configuration: {versions}, Python {platform.python_version()}, gloo on CPU, one thread per rank; "
        f"{store.seconds / 60:.0f} minutes in all.{remark}\n"
    )


def _main_tables(families: Mapping[str, Family]) -> Iterable[str]:
    groups = {
        "Causal language models that publish a plan": causal_families(),
        "Models that read images": image_text_families(),
        "Causal language models that publish no plan": causal_families(with_plan=False),
    }
    for title, names in groups.items():
        found = {name: families[name] for name in names if name in families}
        if found:
            yield f"## {title}\n\n{totals(found, MAIN)}\n\n{table(found, MAIN)}\n"


def _extra_tables(families: Mapping[str, Family]) -> Iterable[str]:
    for key, column in EXTRA.items():
        found = {name: family for name, family in families.items() if key in family.cells}
        if found:
            title = column.title[0].upper() + column.title[1:]
            yield f"## {title}\n\n{totals(found, {key: column})}\n\n{table(found, {key: column})}\n"


def totals(families: Mapping[str, Family], columns: Mapping[str, Column]) -> str:
    """Count the exact ones of each column, in a sentence."""
    lines = []
    for key, column in columns.items():
        cells = [family.cells[key] for family in families.values() if key in family.cells]
        if cells:
            lines.append(f"{column.title}: {sum(cell.exact for cell in cells)} of {len(cells)} exact")
    missing = sum(not family.parameters for family in families.values())
    if missing:
        lines.append(f"not built: {missing} of {len(families)}")
    return "; ".join(lines) + "."


def table(families: Mapping[str, Family], columns: Mapping[str, Column]) -> str:
    """Write a row for each family."""
    titles = [column.title for column in columns.values()] if len(columns) > 1 else ["verdict"]
    head = ["family", *titles, "worst error", "remarks"]
    rows = [head, ["---"] * len(head), *(_row(name, family, columns) for name, family in sorted(families.items()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, family: Family, columns: Mapping[str, Column]) -> list[str]:
    cells = [family.cells.get(key) for key in columns]
    errors = [cell.error for cell, column in zip(cells, columns.values(), strict=True) if cell and column.run]
    finite = [error for error in errors if math.isfinite(error)]
    worst = f"{max(finite):.0e}" if finite else "-"
    return [name, *(_verdict(cell) for cell in cells), worst, _remarks(family, columns)]


def _verdict(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.failure:
        return "**fails**"
    if not cell.exact:
        return "**differs**"
    return "exact" if cell.error <= BAR else "exact in float64"


def _remarks(family: Family, columns: Mapping[str, Column]) -> str:
    if not family.parameters:
        return _text(f"not built: {family.reason}")
    remarks = [*_rounding(family, columns)]
    for key, column in columns.items():
        cell = family.cells.get(key)
        if cell is not None and cell.note:
            remarks.append(f"{column.title}: {cell.note}")
        elif cell is not None and not cell.exact:
            remarks.append(f"{column.title}: {cell.failure or _size(cell, column)}")
    if len(columns) > 1 and family.reason and not family.images and "takes pixels" not in family.reason:
        remarks.append(f"text only ({family.reason})")
    return _text("; ".join(remarks))


def _size(cell: Cell, column: Column) -> str:
    return f"{cell.error:.0f} tensors: {cell.where}" if column.weights else f"{cell.error:.0e} {cell.where}"


def _rounding(family: Family, columns: Mapping[str, Column]) -> Iterable[str]:
    """One remark for all cells that are exact in float64 only."""
    cells = [c for key in columns if (c := family.cells.get(key)) and c.exact and c.error > BAR]
    if cells:
        worst = max(cells, key=lambda cell: cell.error)
        fine = max(cell.fine_error or 0.0 for cell in cells)
        yield f"rounding: {worst.error:.0e} in float32 ({worst.where}), {fine:.0e} in float64"


def _text(remark: str) -> str:
    return remark.replace("|", "\\|").replace("<", "&lt;")
