"""Private methods of Lightning's strategies and callbacks that ours override: each calls one with a public name."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy


class LaunchedStrategy(ParallelStrategy):
    """To stand before a strategy of Lightning that starts processes and joins them in a group."""

    def before_launch(self) -> None:
        """Runs when the trainer knows how many processes there will be, before any is started."""

    def own_backend(self) -> str | None:
        """Returns the backend of the group, where the user gave none; ``None``: Lightning's choice."""

    def _configure_launcher(self) -> None:
        self.before_launch()
        # One process starts no other; with a launcher Lightning would refuse it in a notebook, which is no script.
        if len(self.parallel_devices or ()) * self.num_nodes > 1:  # type: ignore[attr-defined]
            super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        return self.own_backend() or super()._get_process_group_backend()  # type: ignore[misc]


def expect_first_step(strategy: DDPStrategy) -> None:
    """Lets a step by hand be the first one of torch's wrapper, which was made anew.

    With ``static_graph`` Lightning has it reduce what the first backward pass left, which the wrapper does by itself in
    automatic optimization only; it does so once per run.
    """
    strategy._pl_static_graph_delay_done = False


class ExchangedStochasticAveraging(StochasticWeightAveraging):
    """A callback that hands on the average that a checkpoint holds, instead of loading it."""

    def load_average(self, state: Any) -> None:
        """Takes the entry of a checkpoint."""

    def _load_average_model_state(self, model_state: Any) -> None:
        self.load_average(model_state)


class ExchangedAveraging(WeightAveraging):
    """A callback that exchanges a model's weights and their average through a stand-in for the module."""

    def stand_in(self, module: LightningModule) -> Any:
        """Returns what has the ``parameters()`` and ``buffers()`` that are exchanged."""
        return module

    def note_exchange(self) -> None:
        """Is called when the two have been exchanged."""

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(self.stand_in(pl_module))
        self.note_exchange()

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        super()._copy_average_to_current(self.stand_in(pl_module))
