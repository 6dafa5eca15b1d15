"""Code that comes with a model or a tokenizer: it runs where a user has said so, and nobody is asked on a terminal."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

UNTRUSTED = {"trust_remote_code": False}
"""What is passed where nothing was said: transformers would ask on the terminal, on each rank."""

_OF_COMMANDS = " (of evaluate and generate: --model_kwargs.trust_remote_code=true)"


def trusts(kwargs: Mapping[str, Any] | None) -> bool:
    """Tell whether arguments of ``from_pretrained`` let code run that comes with a model."""
    return bool((kwargs or {}).get("trust_remote_code"))


@contextmanager
def asking_trust(name: str, where: str) -> Generator[None, None, None]:
    """Says what a model, or a tokenizer, wants whose code nobody has allowed to run within this context.

    Raises:
        ValueError: in place of transformers' own.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name!r} comes with code of its own; once you have read it, allow it to run with "
            f"{where}.trust_remote_code=true{_OF_COMMANDS if where != 'model_kwargs' else ''}"
        ) from error
