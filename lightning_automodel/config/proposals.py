"""Proposes what may have been meant by a name that does not exist."""

import difflib
from collections.abc import Iterable


def closest(given: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that ``given`` is most like, whatever its case; ``None`` if none is close."""
    names = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(given.casefold(), names, n=1)
    return names[found[0]] if found else None


def proposal(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Propose the closest of ``known`` as the end of a sentence; empty if none is close."""
    name = closest(given, known)
    return f"; did you mean {prefix}{name}?" if name else ""
