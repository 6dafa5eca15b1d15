"""What rows gave, on disk as soon as it is known, so that another call goes on with the rest."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks._page import configuration

Found = dict[str, Any]


class Kept:
    """What was found of rows, or of their smallest form, by their keys; kept in ``rows.json`` of a folder.

    Args:
        folder: where that is; ``None``: nothing is kept.
        smoke: rows are of the smallest form.
        elsewhere: nothing is measured here, and what is kept may be of another machine.
    """

    def __init__(self, folder: Path | None, smoke: bool = False, elsewhere: bool = False) -> None:
        self._path = None if folder is None else folder / "rows.json"
        self.machine: dict[str, Any] = {"device": name_of_device(), "torch": torch.__version__, "smoke": smoke}
        self.configuration = configuration()
        self._rows: dict[str, Found] = {}
        if self._path is not None and self._path.exists():
            before = json.loads(self._path.read_text())
            self._rows, measured_by = before.pop("rows"), before.pop("configuration", self.configuration)
            if elsewhere:
                self.machine, self.configuration = before, measured_by
            elif before != self.machine:
                sys.exit(f"{self._path} was measured on {before}, and this is {self.machine}; give another --out")
        self.found = dict(self._rows)

    def add(self, key: str, found: Found, begun: bool = True) -> None:
        """Keep what was found of a row; of one that was not ``begun`` only for this call."""
        self.found[key] = found
        if begun:
            self._rows[key] = found
        if begun and self._path is not None:
            kept = {**self.machine, "configuration": self.configuration, "rows": self._rows}
            self._path.write_text(json.dumps(kept, indent=1) + "\n")


def name_of_device() -> str:
    """Return what the driver calls the GPU, on which all but the smallest form is measured."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
