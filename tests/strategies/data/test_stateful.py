"""torchdata's loaders: which states are kept, and what passes give behind one that was loaded."""

import copy
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_automodel._compat.lightning.progress import is_stateful
from lightning_automodel.strategies.data.stateful import with_what_state_says
from lightning_automodel.testing.pool import Pool
from tests.support.training import make_trainer

ROWS = torch.arange(8.0)[:, None]


def stream() -> Any:
    return datasets.Dataset.from_dict({"row": list(range(8))}).to_iterable_dataset()


def numbers(batches: Any) -> list[int]:
    return [int(batch["row"]) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_a_stream_holds_for_one_pass(workers: int) -> None:
    before: Any = with_what_state_says(StatefulDataLoader(stream(), num_workers=workers))
    batches = iter(before)
    assert numbers(next(batches) for _ in range(4)) == [0, 1, 2, 3]
    state = copy.deepcopy(before.state_dict())  # the fourth waits for the loop, which fetches one ahead
    now: Any = with_what_state_says(StatefulDataLoader(stream(), num_workers=workers))
    now.load_state_dict(state)
    assert [numbers(now) for _ in range(3)] == [[3, 4, 5, 6, 7], *[list(range(8))] * 2]


class Remembering(Dataset):
    """A map-style dataset that has a state."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_which_states_are_kept() -> None:
    given: dict[str, tuple[Any, bool]] = {
        "an order of the user's, whole": (StatefulDataLoader(TensorDataset(ROWS), shuffle=True), True),
        "a dataset with a state": (StatefulDataLoader(Remembering()), True),
        "a stream with one": (StatefulDataLoader(stream()), True),
        "torch's": (DataLoader(TensorDataset(ROWS)), False),
    }
    assert {name: is_stateful(with_what_state_says(loader)) for name, (loader, _) in given.items()} == {
        name: kept for name, (_, kept) in given.items()
    }


class Noting(L.LightningModule):
    """Notes the rows of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, ...]] = []

    def train_dataloader(self) -> DataLoader:
        return StatefulDataLoader(TensorDataset(ROWS), batch_size=2, shuffle=True)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.append(tuple(batch[0].flatten().int().tolist()))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def resume_from_lightning(path: Path) -> tuple[bool, list[int]]:
    """Runs on each rank: whether Lightning's DDP has saved a state, and the rows that the second epoch gives here."""
    trainer = make_trainer("ddp", max_epochs=1)
    trainer.fit(Noting())
    trainer.save_checkpoint(path)
    states = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    module = Noting()
    make_trainer({}, max_epochs=2).fit(module, ckpt_path=path)
    return bool(states), [row for batch in module.seen for row in batch]


def test_a_state_that_lightning_has_saved_is_left_out(pool2: Pool, tmp_path: Path) -> None:
    found = pool2.run(resume_from_lightning, tmp_path / "1.ckpt", trainer=True)
    assert all(has_state for has_state, _ in found)
    assert sorted(row for _, seen in found for row in seen) == list(range(8))
