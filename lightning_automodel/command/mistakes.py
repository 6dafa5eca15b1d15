"""Says in one line what is wrong with a command, and proposes what may have been meant.

jsonargparse answers a mistake with all types that were tried. What counts are the last class that refused, the name
that it refused, and the names that it knows.
"""

import dataclasses
import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator

from lightning_automodel.config.imports import import_class_from_path
from lightning_automodel.config.proposals import closest, proposal

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
        return f"there is no option --{found[1]}{_option_meant(found[1], list(known))}"
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        return f"{found[1]!r} belongs to no option; write --NAME=VALUE"
    key = _key(message)
    if found := re.search(r"[Oo]ption '([\w.]+)' is not accepted", message):
        return _unknown_argument(_full_key(key, message, found[1]), _last_class(message), found[1])
    if found := re.search(r"the following arguments are required: (.+)", message):
        names = [name.strip().rpartition(".")[2] for name in found[1].split(",")]
        return "missing: " + ", ".join(f"--{key}.{name}" if key else name for name in names)
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        module = importlib.import_module(found[1])
        names = [name for kind in (inspect.ismodule, inspect.isclass) for name, _ in inspect.getmembers(module, kind)]
        value = re.search(rf"{re.escape(found[1])}\.{found[2]}[\w.]*", message)
        given = value[0] if value else f"{found[1]}.{found[2]}"
        return f"--{key}={given}: there is no such class{proposal(found[2], names, f'{found[1]}.')}"
    if (wrong := _value_of_wrong_type(message)) is not None:
        return f"--{key}={wrong[0]}: it takes {wrong[1]}"
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
    names = argument_names(cls)
    meant = closest(wrong, names) or next((name for name in names if _ends_like(wrong, name)), None)
    hint = f"; did you mean --{own}.{meant}?" if meant else f"; it has {', '.join(n for n in names if '.' not in n)}"
    return f"--{key}: {cls.__name__} has no {wrong!r}{hint}"


def _option_meant(given: str, known: list[str]) -> str:
    """Propose an option by its last name first: ``--tp`` is one of the strategy."""
    ends = [name for cutoff in (1.0, 0.85) for name in known if _ends_like(given, name, cutoff)]
    meant = f"; did you mean --{ends[0]}?" if ends and given not in known else proposal(given, known, "--")
    return meant or "; --help lists them"


def _ends_like(given: str, name: str, cutoff: float = 0.85) -> bool:
    return bool(difflib.get_close_matches(given, [name.rpartition(".")[2]], cutoff=cutoff))


def argument_names(cls: Callable[..., object]) -> list[str]:
    """List the arguments of a class or function, and the fields of the dataclasses among them as ``config.field``."""
    names = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        names.append(name)
        for kind in (parameter.annotation, *typing.get_args(parameter.annotation)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                names += [f"{name}.{field.name}" for field in dataclasses.fields(kind)]
    return names


_PLAIN = ("bool", "int", "float", "list", "dict", "timedelta")


def _value_of_wrong_type(message: str) -> tuple[str, str] | None:
    """Find the value that none of the plain types take that were tried last, and what they are."""
    tried, found, rest = message.partition("Given value type: <class '")  # the first is the innermost
    value = re.match(r"(?:str|int|float|bool)'>\s+Given value: (.*?)(?:\. Got value:|$)", rest, re.MULTILINE)
    types = re.findall(r"Subtypes: \[(.*)\]", tried)[-1:]
    names = [name for name in re.findall(r"\w+", types[0].replace("NoneType", "")) if name in _PLAIN] if types else []
    is_class = "Expected a dot import path" in tried and not {"int", "float"} & set(names)  # of those that it takes
    if not found or value is None or not names or is_class:
        return None
    written = dict.fromkeys("a duration such as '0:30:00'" if name == "timedelta" else f"a {name}" for name in names)
    return value[1], " or ".join(written).replace("a int", "an int")


def _class_names(message: str) -> list[str]:
    """List what could stand where a class is expected: subclasses of the types in the message, and of the argument."""
    paths = re.findall(r"<class '([\w.]+\.[\w.]+)'>|\[([\w.]+\.[A-Z]\w+)\]", message)
    bases = [import_class_from_path(path[0] or path[1]) for path in paths]
    cls, keys = _last_class(message), re.findall(r'Parser key "(\w+)"', message)
    if cls is not None and keys and (parameter := inspect.signature(cls).parameters.get(keys[-1])):
        bases = [*_classes_of(parameter.annotation), *bases]
    return list(dict.fromkeys(child.__name__ for base in bases for child in _subclasses(base)))


def _classes_of(annotation: typing.Any) -> Iterator[type]:
    """Find the classes of a type, and of what is called the one that it returns."""
    if isinstance(annotation, type) and annotation.__module__ not in ("builtins", "collections.abc"):
        yield annotation
    arguments = typing.get_args(annotation)
    for argument in arguments[-1:] if typing.get_origin(annotation) is Callable else arguments:
        yield from _classes_of(argument)


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        yield child
        yield from _subclasses(child)


def squeezed(message: str) -> str:
    """Shorten ``message`` to one line."""
    text = " ".join(message.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
