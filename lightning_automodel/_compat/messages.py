"""Leaves out what other libraries print when they are imported and what tells nobody anything, each by its words.

torchao names each extension that was built for another CUDA version, and calls what torch has deprecated; bitsandbytes
names kernels that nobody asked for. All else that they print stays.
"""

import logging
import warnings

_PRINTED = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    "torchao": "Failed to load ",
}
_TOLD_BY_LIGHTNING = ("💡 Tip: ", "TPU available: ")
_WARNED = (  # beginnings
    "LightningCLI's args parameter is intended",  # the command gives them itself
    "Starting from v1.9.0, `tensorboardX` has been removed",  # the table of the run says where logs are
    "Precision .+ is not supported by the model summary",  # and this what a rank holds
    "Total length of `list` across ranks is zero",  # data without validation files
    "`is_gradient_checkpointing` is deprecated",  # peft 0.21 asks transformers 5.23 for it
)


class Without(logging.Filter):
    """Drops the records of one logger whose message holds ``text``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether ``record`` stays."""
        return self.text not in record.getMessage()

    def __eq__(self, other: object) -> bool:
        """Tells whether ``other`` drops the same; loggers take equal filters once."""
        return isinstance(other, Without) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def leave_out_asides() -> None:
    """Leaves out advertisements, and what is no word about the run that the command starts."""
    for text in _TOLD_BY_LIGHTNING:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(Without(text))
    for beginning in _WARNED:
        warnings.filterwarnings("ignore", message=beginning)


def leave_out_deprecations() -> None:
    """Leaves out what libraries warn each other of, for processes beside one that says it."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)


def _leave_out(messages: dict[str, str]) -> None:
    for name, text in messages.items():
        logging.getLogger(name).addFilter(Without(text))


_leave_out(_PRINTED)
