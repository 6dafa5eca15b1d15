"""What was found, family by family, kept in a JSON file so that a later call resumes."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

BAR = 1e-4  # relative error of every gradient in float32
FINE_BAR = 1e-9  # the same in float64, where float32 rounds too much


@dataclass
class Cell:
    """One comparison.

    Attributes:
        error: the largest relative error in float32, ``inf`` where it failed.
        where: what has it.
        failure: why it failed.
        fine_error: the error in float64; ``None``: was not needed.
        note: under which condition this holds, or what the run left undone.
        seconds: wall time; comparisons that share a call share its time.
        from_files: both sides read their weights; ``False``: of an earlier release, which began with a model in memory.
    """

    error: float
    where: str = ""
    failure: str = ""
    fine_error: float | None = None
    note: str = ""
    seconds: float = 0.0
    from_files: bool = False

    @property
    def exact(self) -> bool:
        """Within the bar, in float32 or else in float64."""
        return self.error <= BAR or (self.fine_error is not None and self.fine_error <= FINE_BAR)


@dataclass
class Family:
    """All about one family.

    Attributes:
        parameters: of the tiny model; 0: it could not be built.
        plan: where its plan comes from; empty: none.
        images: whether its batches hold images.
        reason: why they do not, or why the model could not be built or run on one process.
        cells: by column.
    """

    parameters: int = 0
    plan: str = ""
    images: bool = False
    reason: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)


class Store:
    """The results on disk, written after each family.

    Attributes:
        families: what was found, by model type.
        oracle: what the oracle found, in words.
        seconds: that all of it took.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.families: dict[str, Family] = {}
        self.oracle = ""
        self.seconds = 0.0
        if path.exists():
            content = json.loads(path.read_text())
            self.oracle, self.seconds = content["oracle"], content["seconds"]
            for name, values in content["families"].items():
                cells = {column: Cell(**cell) for column, cell in values.pop("cells").items()}
                self.families[name] = Family(**values, cells=cells)

    def forget(self, families: list[str], columns: list[str]) -> None:
        """Drops results, so that they are found anew."""
        for name in families:
            family = self.families.pop(name, None)
            if family is not None and family.parameters:
                kept = {key: cell for key, cell in family.cells.items() if key not in columns}
                self.families[name] = dataclasses.replace(family, cells=kept)

    def save(self) -> None:
        """Writes everything, through a second file so that an interruption loses nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        families = {name: dataclasses.asdict(family) for name, family in self.families.items()}
        content = {"oracle": self.oracle, "seconds": self.seconds, "families": families}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(self.path)
