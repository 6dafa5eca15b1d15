"""A row of a ladder has what the rows above it have, and its command starts a run with just that."""

import pytest

from benchmarks import levers
from benchmarks._ladder import accumulated
from benchmarks._lever_rows import BF16, LADDERS, RANKS
from lightning_automodel import FSDP2Config
from lightning_automodel.cli import AutomodelCLI
from lightning_automodel.config.values import resolve_mp_policy
from tests.support.marks import with_long

ROWS = [(layout, name) for layout in LADDERS for name in levers.ladder(layout)]


class Built(AutomodelCLI):
    """Stops before anything runs."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def test_rungs_add_up() -> None:
    assert accumulated({"a": {"x": 1}, "b": {"y": 2}, "c": {"x": 3}}) == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": {"x": 3, "y": 2},
    }


@pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")
@pytest.mark.parametrize(("layout", "name"), with_long(ROWS, *ROWS[1:-1]))
def test_the_command_of_a_row_has_its_levers(layout: str, name: str) -> None:
    row = levers.ladder(layout)[name]
    measured, command = levers.reproduced(layout, name, row).strip("`").split("`; `")
    assert measured.endswith(f"--ladder {layout} --upto '{name}'")
    given = [word for word in command.split()[1:] if not word.startswith("--config")]
    strategy = Built([*given, "--model.model=anywhere", "--trainer.accelerator=cpu"]).trainer.strategy
    assert getattr(strategy.sizes, layout) == RANKS
    if "mp_policy" in row.fields:
        assert strategy.precision_plugin.mp_policy == resolve_mp_policy(BF16)
    fields = {key: value for key, value in row.fields.items() if key != "mp_policy"}
    assert strategy.config.to_dict() == {**FSDP2Config().to_dict(), **fields}


def test_a_row_is_compared_with_the_one_above_and_the_first() -> None:
    rows = [
        levers.Found([0.9 * seconds, seconds, 1.1 * seconds], peak * levers.MIB, 0, 0)
        for seconds, peak in ((1.0, 8), (0.5, 4), (0.25, 1))
    ]
    assert levers.compared(rows[2], rows[1], rows[0]) == "250 ms | 238 to 262 | 0.50 | 0.25 | 1 MiB | 0.25 | 0.12"
    assert levers.compared(rows[1], None, rows[0]) == "500 ms | 475 to 525 |  | 0.50 | 4 MiB |  | 0.50"
