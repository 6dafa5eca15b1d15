"""Runs the columns of one family on pools of ranks; a call that hangs or dies ends alone."""

import time
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.exactness.columns import COLUMNS, Column
from benchmarks.exactness.results import BAR, Cell, Family
from lightning_automodel.testing.pool import Nursery, Pool, PoolTimeout, RankFailed
from tests.support.images import Inputs
from tests.support.run_family import Outcome, Probe, probe, run_all
from tests.support.weights import weights

SECONDS = 180.0
_WORLDS = sorted({column.world for column in COLUMNS.values()})


class Runner:
    """The pools, and the order of things.

    Args:
        nursery: of the ranks.
        seconds: for one call.
    """

    def __init__(self, nursery: Nursery, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.pools = {world: Pool(nursery, world) for world in (1, *_WORLDS)}

    def family(self, name: str, wanted: Mapping[str, Column], known: Family | None) -> Family:
        """Adds the ``wanted`` columns to what is ``known`` about a family."""
        if known is not None and all(column.weights for column in wanted.values()):
            found, inputs = known, Inputs()
        else:
            found, inputs = self._probe(name, known)
        if not found.parameters:
            return found
        columns = {key: column for key, column in wanted.items() if found.plan or not column.needs_plan}
        through_files = {key: column for key, column in columns.items() if column.weights}
        if through_files:
            found.cells |= self._weights(name, through_files, planned=bool(found.plan))
        for world in _WORLDS:
            of_world = {key: column for key, column in columns.items() if column.world == world}
            group = {key: column for key, column in of_world.items() if not column.weights}
            if group:
                found.cells |= self._cells(name, group, inputs, world)
        return found

    def _probe(self, name: str, known: Family | None) -> tuple[Family, Inputs]:
        try:
            result: Probe = self.pools[1].run(probe, name, timeout=self.seconds)[0]
        except (RankFailed, PoolTimeout) as error:
            return Family(reason=_last_line(error)), Inputs()
        reason = result.failure or result.inputs.reason
        family = Family(
            parameters=result.parameters, plan=result.plan, images=bool(result.inputs.images), reason=reason
        )
        family.cells = known.cells if known else {}
        return family, result.inputs

    def _cells(self, name: str, columns: Mapping[str, Column], inputs: Inputs, world: int) -> dict[str, Cell]:
        start = time.monotonic()
        outcomes = self._call(name, columns, inputs, world)
        seconds = (time.monotonic() - start) / len(columns)
        cells = {
            key: Cell(o.error, o.where, o.failure, note=o.note, seconds=seconds, from_files=True)
            for key, o in outcomes.items()
        }
        if inputs.images and not inputs.images_needed:
            for key, cell in cells.items():
                if cell.failure:
                    cells[key] = self._with_images_everywhere(name, key, columns[key], inputs, cell)
        over = {key: columns[key] for key, cell in cells.items() if _may_be_rounding(columns[key], cell)}
        if over:
            for key, outcome in self._call(name, over, inputs, world, double=True).items():
                cells[key].fine_error = outcome.error
                cells[key].failure = outcome.failure and f"in float64: {outcome.failure}"
        return cells

    def _weights(self, name: str, columns: Mapping[str, Column], planned: bool) -> dict[str, Cell]:
        """All layouts in one cell: the number of tensors that differ, and the first ones."""
        start = time.monotonic()
        found = []
        for world in (2, 4) if planned else (2,):
            try:
                found.append(
                    self.pools[world].run(weights, name, planned, with_directory=True, timeout=self.seconds)[0]
                )
            except (RankFailed, PoolTimeout) as error:
                return {key: Cell(float("inf"), failure=_last_line(error)) for key in columns}
        seconds = (time.monotonic() - start) / len(columns)
        cells = {}
        for key, column in columns.items():
            different = [text for result in found for text in getattr(result, column.weights)]
            cells[key] = Cell(len(different), "; ".join(different[:2]), seconds=seconds)
        return cells

    def _with_images_everywhere(self, name: str, key: str, column: Column, inputs: Inputs, before: Cell) -> Cell:
        outcome = self._call(name, {key: column}, replace(inputs, images_needed=True), column.world)[key]
        if outcome.failure:
            return before
        note = f"where every micro-batch holds images; else {before.failure}"
        return Cell(outcome.error, outcome.where, note=note, seconds=before.seconds, from_files=True)

    def _call(
        self, name: str, columns: Mapping[str, Column], inputs: Inputs, world: int, double: bool = False
    ) -> dict[str, Outcome]:
        """All columns in one call; each in one of its own, if that fails."""
        runs = {key: column.run for key, column in columns.items()}
        try:
            return self.pools[world].run(
                run_all, name, runs, inputs, double, timeout=self.seconds, with_directory=True
            )[0]
        except (RankFailed, PoolTimeout) as error:
            if len(columns) == 1:
                return {key: Outcome(error=float("inf"), failure=_last_line(error)) for key in columns}
        outcomes: dict[str, Outcome] = {}
        for key, column in columns.items():
            outcomes |= self._call(name, {key: column}, inputs, world, double)
        return outcomes


def pending(known: Family | None, name: str, keys: list[str]) -> dict[str, Column]:
    """The columns in ``keys`` that apply to a family and that have no result yet."""
    if known is not None and not known.parameters:
        return {}
    applying = {key: COLUMNS[key] for key in keys if name in (COLUMNS[key].families or (lambda: [name]))()}
    if known is None:
        return applying
    return {
        key: column
        for key, column in applying.items()
        if key not in known.cells and (known.plan or not column.needs_plan)
    }


def _may_be_rounding(column: Column, cell: Cell) -> bool:
    return column.run is not None and not cell.failure and cell.error > BAR


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
