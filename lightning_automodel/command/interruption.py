"""Says, when a run is stopped by Ctrl-C, from which checkpoint it goes on, and by which command."""

import shlex
from collections.abc import Sequence

import lightning as L

from lightning_automodel.distributed.logs import log
from lightning_automodel.strategies.checkpoints.newest import newest_of


class GoOnCommand(L.Callback):
    """Logs the command that goes on with an interrupted fit.

    Args:
        words: of the command that was given, without its name.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Logs it, on rank 0, if it was Ctrl-C."""
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "fit":
            log(describe_stop(trainer.global_step, newest_of(trainer), self.words))


def describe_stop(step: int, checkpoint: str | None, words: Sequence[str]) -> str:
    """Say after which ``step`` a run stopped, and how it goes on from ``checkpoint``."""
    stopped = f"stopped by Ctrl-C after step {step}"
    if checkpoint is None:
        return f"{stopped}; no checkpoint was complete, so there is none to go on from"
    kept = [word for i, word in enumerate(words) if not _is_of_path(word, words[i - 1] if i else "")]
    command = shlex.join(["lightning-automodel", *kept, f"--ckpt_path={checkpoint}"])
    return f"{stopped}; go on from the newest complete checkpoint with\n  {command}"


def _is_of_path(word: str, before: str) -> bool:
    return word.startswith("--ckpt_path") or before == "--ckpt_path"
