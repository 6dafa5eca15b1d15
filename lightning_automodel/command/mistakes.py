"""Says in one line what is wrong with a command, and proposes what may have been meant.

jsonargparse answers a mistake with all types that were tried. What counts are the last class that refused, the name
that it refused, and the names that it knows.
"""

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Iterable, Iterator

from lightning_automodel.config.imports import import_class_from_path

_LONGEST = 300  # characters of a message that fits no pattern


def describe_mistake(message: str, known: Iterable[str], subcommands: Iterable[str]) -> str:
    """Shorten jsonargparse's ``message`` to one line.

    Args:
        message: of the error that the parser raised.
        known: the keys that the parser accepts, such as ``trainer.max_steps``.
        subcommands: the first words that the command accepts.

    Returns:
        a line that names the key and the value, with a proposal where one is close.
    """
    if found := re.search(r"invalid choice: '(.*?)'|expected \"subcommand\"", message):
        choices = list(subcommands)
        given = f"{found[1]!r} is no subcommand" if found[1] else "a subcommand is missing"
        return f"{given}{proposal(found[1] or '', choices)}; use one of {', '.join(choices)}"
    if found := re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message):
        return f"there is no option --{found[1]}{proposal(found[1], list(known), '--')}"
    key = _key(message)
    if found := re.search(r"[Oo]ption '([\w.]+)' is not accepted", message):
        return _unknown_argument(_full_key(key, message, found[1]), _last_class(message), found[1])
    if found := re.search(r"the following arguments are required: (.+)", message):
        names = [name.strip().rpartition(".")[2] for name in found[1].split(",")]
        return "missing: " + ", ".join(f"--{key}.{name}" if key else name for name in names)
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"--{key}={found[1]}: there is no such class{proposal(found[1], _class_names(message))}"
    if found := re.search(
        r"Multiple subclasses with name (\w+)\. Give the full class path to avoid ambiguity: (.+?)\.\s", message
    ):
        return f"--{key}={found[1]}: several classes have this name; give one in full: {found[2]}"
    if values := re.findall(r"Expected an? <class '(\w+)'>\. Got value: (.*)", message):
        kind, value = values[-1]
        return f"--{key}={value}: it takes an {kind}" if kind == "int" else f"--{key}={value}: it takes a {kind}"
    if choices := re.findall(r"typing\.Literal\[(.*?)\]", message):
        return _not_among(key, message, [choice for each in choices for choice in each.split(", ")])
    rest = squeezed(re.sub(r'Parser key "[\w.]+":', "", message))
    return f"--{key}: {rest}" if key else rest


def _not_among(key: str, message: str, choices: list[str]) -> str:
    """Name the words that a setting takes."""
    words = list(dict.fromkeys(choice.strip("'") for choice in choices))
    found = re.search(r"val='(.*?)'\)|(?:Given|Got) value: (\S+)", message)
    value = (found[1] or found[2]) if found else ""
    return f"--{key}{'=' + value if value else ''}{proposal(value, words)}; use one of {', '.join(words)}"


def _key(message: str) -> str:
    """Join the keys of the nested parsers that the message goes through."""
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    nested = re.findall(r"NestedArg\(key='([\w.]+)'", message)
    if nested and keys:
        return f"{keys[0]}.{max(nested, key=len)}"
    return ".".join(keys)


def _full_key(key: str, message: str, option: str) -> str:
    return key if key.endswith(option) else f"{key}.{option}"


def _last_class(message: str) -> type | None:
    paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
    return import_class_from_path(paths[-1]) if paths else None


def _unknown_argument(key: str, cls: type | None, option: str) -> str:
    if cls is None:
        return f"there is no option --{key}"
    own, _, wrong = key.rpartition(".")
    names = _argument_names(cls)
    close = difflib.get_close_matches(wrong, names, n=1) or [
        name for name in names if difflib.get_close_matches(wrong, [name.rpartition(".")[2]], cutoff=0.85)
    ]
    hint = f"; did you mean --{own}.{close[0]}?" if close else f"; it has {', '.join(n for n in names if '.' not in n)}"
    return f"--{key}: {cls.__name__} has no {wrong!r}{hint}"


def _argument_names(cls: type) -> list[str]:
    """List the arguments of a class, and the fields of the dataclasses among them as ``config.field``."""
    names = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        names.append(name)
        for kind in (parameter.annotation, *typing.get_args(parameter.annotation)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                names += [f"{name}.{field.name}" for field in dataclasses.fields(kind)]
    return names


def _class_names(message: str) -> list[str]:
    """List what could stand where a class is expected: the subclasses of the types in the message."""
    found: dict[str, None] = {}
    for path in re.findall(r"<class '([\w.]+\.[\w.]+)'>|\[([\w.]+\.[A-Z]\w+)\]", message):
        base = import_class_from_path(path[0] or path[1])
        for cls in _subclasses(base):
            found.setdefault(cls.__name__)
    return list(found)


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        yield child
        yield from _subclasses(child)


def proposal(given: str, known: list[str], prefix: str = "") -> str:
    """Propose the closest of ``known`` as the end of a sentence; empty if none is close."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def squeezed(message: str) -> str:
    """Shorten ``message`` to one line."""
    text = " ".join(message.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
