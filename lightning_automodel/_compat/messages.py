"""Leaves out what other libraries print when they are imported and what tells nobody anything, by their loggers.

torchao names each extension that was built for another CUDA version, and calls what torch has deprecated; bitsandbytes
names kernels that nobody asked for. All else that they print stays.
"""

import logging

_PRINTED = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    "torchao": "Failed to load ",
}
_TIPS = {"lightning.pytorch.utilities.rank_zero": "💡 Tip: "}


class Without(logging.Filter):
    """Drops the records of one logger whose message holds ``text``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether ``record`` stays."""
        return self.text not in record.getMessage()


def leave_out_tips() -> None:
    """Leaves out Lightning's advertisements of other packages."""
    _leave_out(_TIPS)


def _leave_out(messages: dict[str, str]) -> None:
    for name, text in messages.items():
        logging.getLogger(name).addFilter(Without(text))


_leave_out(_PRINTED)
