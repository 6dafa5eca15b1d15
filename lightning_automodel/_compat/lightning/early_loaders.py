"""Private names of Lightning: training loaders that are asked for before a run that resumes knows where it goes on."""

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer import Trainer


class _OfLength:
    """Stands for a loader of which the length alone is asked: nothing begins."""

    def __init__(self, loader: object) -> None:
        self.length = sized_len(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the loader has no length")
        return self.length


def begin_passes_in_run(trainer: Trainer) -> None:
    """Lets training loaders that are asked for before training begin their passes when it starts.

    ``trainer.estimated_stepping_batches`` sets them up, in ``configure_optimizers`` above all, when the loops and the
    random state of a checkpoint are not restored yet. Lightning would begin their first pass there, as one of epoch 0,
    and put no loader where it was saved.
    """
    begin_passes_as_ever(trainer)
    loop = trainer.fit_loop
    setup, run = loop.setup_data, loop.run

    def look() -> None:
        if loop._combined_loader is not None:
            return
        found: list[Any] = []

        def stand_in() -> None:
            assert loop._combined_loader is not None
            found.extend(loop._combined_loader.flattened)
            loop._combined_loader.flattened = [_OfLength(loader) for loader in found]

        prepare = loop._load_combined_loader_states
        vars(loop)["_load_combined_loader_states"] = stand_in
        setup()
        vars(loop)["_load_combined_loader_states"] = prepare
        if loop._combined_loader is not None:  # Trainer(limit_train_batches=0) asks for none
            loop._combined_loader.flattened = found

    def begin() -> None:
        begin_passes_as_ever(trainer)
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        if combined is not None and fetcher is not None and not loop._should_reload_train_dl:
            loop._load_combined_loader_states()
            fetcher.setup(combined)
            iter(fetcher)
        run()

    vars(loop).update(setup_data=look, run=begin)


def begin_passes_as_ever(trainer: Trainer) -> None:
    """Undoes :func:`begin_passes_in_run`, also where a call has failed before it trained."""
    for name in ("run", "setup_data"):
        vars(trainer.fit_loop).pop(name, None)
