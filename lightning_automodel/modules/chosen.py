"""Finds lists of layers of which a pass calls some: heads of tasks, experts with their tokens. Read off the source.

::

    for layer in self.layers: x = layer(x)                     a chain: all are called, in one order
    self.heads[task](x)                                        chosen
    for i, expert in enumerate(self.experts):
        if (chosen == i).any(): ... expert(x[chosen == i])     chosen
    for _ in range(steps):                                     chosen: a rank may call all of them more often
        for layer in self.layers: x = layer(x)
    for image in images:                                       so, too, and where a method of its own does the same
        for layer in self.layers: image = layer(image)

What is gathered alone has to be called by all ranks alike, which layers that samples choose are not.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Set
from typing import TypeGuard

from torch import nn

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_Loop = ast.For | ast.While | _COMPREHENSIONS


def is_chosen_from(holder: nn.Module, name: str) -> bool:
    """Tell whether the code of ``holder`` calls some members of its list ``name``, and others not.

    Code that is not there to be read counts as a chain.
    """
    return any(_chooses(tree, name) for tree in _sources(holder))


def skips_layers(model: nn.Module) -> bool:
    """Tells whether layers are skipped at random (``layerdrop``), by what modules or their configs hold."""
    held = [vars(module) for module in model.modules()]
    held += [vars(values["config"]) for values in held if hasattr(values.get("config"), "__dict__")]
    values = [value for each in held for key, value in each.items() if "layerdrop" in key]
    return any(isinstance(value, int | float) and value > 0 for value in values)


def _sources(holder: nn.Module) -> Iterator[ast.AST]:
    for kind in type(holder).__mro__[: type(holder).__mro__.index(nn.Module)]:
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):
            continue


def _chooses(tree: ast.AST, name: str) -> bool:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    chains = {index for loop in loops if _counts(loop.iter) for index in _names(loop.target)}
    used = (node.func if isinstance(node, ast.Call) else node.value for node in ast.walk(tree) if _takes(node))
    members = (node for node in used if isinstance(node, ast.Subscript) and _is_list(node.value, name))
    if any(
        not isinstance(node.slice, ast.Constant | ast.Slice) and not _names(node.slice) & chains for node in members
    ):
        return True
    fixed, callers = _fixed(tree), _callers(tree, name)
    if any(_calls_in_turns(node, name, callers) for node in _of_training(tree) if _is_of_any_length(node, fixed)):
        return True
    return any(_skips(loop.body, _called_in(loop, name)) for loop in loops)


def _fixed(tree: ast.AST) -> set[str]:
    """Find the names of what is the same in every pass, in functions of a class: what is computed from attributes."""
    fixed = {"self", "len", "range", "int", "min", "max", "list", "tuple", "sorted", "reversed", "enumerate"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_fixed(node.value, fixed):
            fixed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and _is_fixed(node.iter, fixed):
            fixed |= _names(node.target)
    return fixed


def _is_fixed(many: ast.AST, fixed: set[str]) -> bool:
    """Tell whether something has the same length in every pass."""
    if isinstance(many, ast.Tuple | ast.List) and not any(isinstance(part, ast.Starred) for part in many.elts):
        return True
    if isinstance(many, ast.Call) and isinstance(many.func, ast.Name) and many.func.id in {"enumerate", "zip"}:
        return any(_is_fixed(part, fixed) for part in many.args)
    return _names(many) <= fixed


def _of_training(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through a tree, past what is done without gradients."""
    if not (isinstance(tree, ast.With) and any("no_grad" in ast.unparse(item) for item in tree.items)):
        yield tree
        for child in ast.iter_child_nodes(tree):
            yield from _of_training(child)


def _callers(tree: ast.AST, name: str) -> set[str]:
    """Find the methods that call members of a list, or one another of these; what calls ``forward`` generates."""
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "forward"]
    callers: set[str] = set()
    while more := {
        method.name
        for method in methods
        if method.name not in callers and any(_reaches(node, name, callers) for node in ast.walk(method))
    }:
        callers |= more
    return callers


def _reaches(node: ast.AST, name: str, callers: set[str], counted: Set[str] = frozenset()) -> bool:
    """Tell whether members are called there: in a loop through them, by an index, or by a method that does.

    Args:
        node: of a tree.
        name: of the list.
        callers: those methods.
        counted: an index that has one of these names says nothing: the loop around counts through members.
    """
    if isinstance(node, ast.For):
        return bool(_called_in(node, name))
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Subscript) and _is_list(called.value, name):
        return isinstance(called.slice, ast.Constant) or not counted & _names(called.slice)
    return isinstance(called, ast.Attribute) and called.attr in callers and ast.unparse(called.value) == "self"


def _is_of_any_length(node: ast.AST, fixed: set[str]) -> TypeGuard[_Loop]:
    """Tell whether a loop is passed through as often as an argument or a value says."""
    if isinstance(node, ast.For):
        return not _is_fixed(node.iter, fixed)
    if isinstance(node, _COMPREHENSIONS):
        return not all(_is_fixed(part.iter, fixed) for part in node.generators)
    return isinstance(node, ast.While)


def _calls_in_turns(loop: _Loop, name: str, callers: set[str]) -> bool:
    """Tell whether each pass through a loop calls members again; not those that it counts through."""
    counted: set[str] = set()
    if isinstance(loop, ast.For):
        counted = _names(loop.target)
    elif isinstance(loop, _COMPREHENSIONS):
        counted = {index for part in loop.generators for index in _names(part.target)}
    return any(_reaches(node, name, callers, counted) for node in ast.walk(loop) if node is not loop)


def _takes(node: ast.AST) -> TypeGuard[ast.Call | ast.Assign | ast.NamedExpr]:
    """Tell whether something is called there, or gets a name; a member may be returned or read without that."""
    return isinstance(node, ast.Call | ast.Assign | ast.NamedExpr)


def _is_list(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _counts(node: ast.AST) -> bool:
    """Tell whether a loop is over ``range(...)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _called_in(loop: ast.For, name: str) -> list[ast.Call]:
    """List the calls of members in a loop: of its variables where it is over the list, and of ``list[index]``."""
    over = any(_is_list(node, name) for node in ast.walk(loop.iter))
    variables = _names(loop.target) if over else set()
    calls = (node for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return [call for call in calls if _is_member(call.func, name, variables)]


def _is_member(function: ast.AST, name: str, variables: set[str]) -> bool:
    if isinstance(function, ast.Subscript):
        return _is_list(function.value, name)
    return isinstance(function, ast.Name) and function.id in variables


def _skips(body: list[ast.stmt], calls: list[ast.Call]) -> bool:
    """Tell whether a pass through ``body`` may come past its calls of members."""
    inside = [statement for statement in body if any(call in calls for call in ast.walk(statement))]
    if not inside:
        return False
    before = body[: body.index(inside[0])]
    if any(isinstance(node, ast.Continue | ast.Break) for statement in before for node in ast.walk(statement)):
        return True
    return all(_skips_inside(statement, calls) for statement in inside)


def _skips_inside(statement: ast.stmt, calls: list[ast.Call]) -> bool:
    if isinstance(statement, ast.If):
        return any(not _has(branch, calls) or _skips(branch, calls) for branch in (statement.body, statement.orelse))
    return any(_skips(inner, calls) for inner in _blocks(statement))


def _has(body: list[ast.stmt], calls: list[ast.Call]) -> bool:
    return any(node in calls for statement in body for node in ast.walk(statement))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, ast.With):
        yield statement.body
