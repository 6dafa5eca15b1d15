"""The folder in which blocks of the pages run: what the quickstart leaves, but smaller."""

from tests.examples.conftest import workspace
from tests.finetuning.conftest import model_dir

__all__ = ["model_dir", "workspace"]
