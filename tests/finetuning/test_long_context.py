"""The example of a long sequence on two processes."""

from pathlib import Path

import pytest

from lightning_automodel.cli import main
from lightning_automodel.testing.pool import Pool

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "long_context.yaml"


def fit(arguments: list[str]) -> None:
    """Runs on each rank."""
    main(["fit", f"--config={EXAMPLE}", *arguments])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")
def test_the_example_runs(pool2: Pool, model_dir: Path, tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"{index}: the lazy dog sleeps. " * 40)
    paths = [f"--model.model={model_dir}", f"--data.train_files={tmp_path}/*.txt", f"--data.cache_dir={tmp_path}/cache"]
    root = f"--trainer.default_root_dir={tmp_path}"
    pool2.run(fit, [*paths, "--data.sequence_length=256", "--trainer.max_steps=2", root], trainer=True, timeout=120)
