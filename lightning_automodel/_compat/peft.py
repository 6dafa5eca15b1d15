"""Private names of peft, with the reason: what it does to layers whose weights are DTensors."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def whole_layers() -> Generator[None, None, None]:
    """Make peft build adapters for whole layers within this context, wherever their weights are DTensors.

    It would take the shape of a rank's part, which is right for modules that compute with it as they are. Ours are made
    parallel when all adapters are there.
    """
    if find_spec("peft") is None:
        yield
        return
    from peft.tuners import tuners_utils

    before = tuners_utils._torch_supports_distributed
    tuners_utils._torch_supports_distributed = False
    try:
        yield
    finally:
        tuners_utils._torch_supports_distributed = before
