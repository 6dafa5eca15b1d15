"""Finds lists of layers of which a pass calls some: heads of tasks, experts with their tokens. Read off the source.

::

    for layer in self.layers: x = layer(x)                     a chain: all are called, in one order
    self.heads[task](x)                                        chosen
    for i, expert in enumerate(self.experts):
        if (chosen == i).any(): ... expert(x[chosen == i])     chosen
    for _ in range(steps):                                     chosen: a rank may call all of them more often
        for layer in self.layers: x = layer(x)

What is gathered alone has to be called by all ranks alike, which layers that samples choose are not.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import TypeGuard

from torch import nn


def is_chosen_from(holder: nn.Module, name: str) -> bool:
    """Tell whether the code of ``holder`` calls some members of its list ``name``, and others not.

    Code that is not there to be read counts as a chain.
    """
    return any(_chooses(tree, name) for tree in _sources(holder))


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
    fixed = _fixed(tree)
    if any(_calls_in_turns(node, name) for node in _of_training(tree) if _is_of_any_length(node, fixed)):
        return True
    return any(_skips(loop.body, _called_in(loop, name)) for loop in loops)


def _fixed(tree: ast.AST) -> set[str]:
    """Find the names of what is the same in every pass, in functions of a class: what is computed from attributes."""
    fixed = {"self", "len", "range", "int", "min", "max"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _names(node.value) <= fixed:
            fixed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return fixed


def _of_training(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk through a tree, past what is done without gradients."""
    if not (isinstance(tree, ast.With) and any("no_grad" in ast.unparse(item) for item in tree.items)):
        yield tree
        for child in ast.iter_child_nodes(tree):
            yield from _of_training(child)


def _is_of_any_length(node: ast.AST, fixed: set[str]) -> TypeGuard[ast.For | ast.While]:
    """Tell whether a loop is passed through as often as an argument or a value says."""
    if isinstance(node, ast.For):
        return _counts(node.iter) and not _names(node.iter) <= fixed
    return isinstance(node, ast.While)


def _calls_in_turns(loop: ast.For | ast.While, name: str) -> bool:
    """Tell whether each pass through a loop calls members again; not those that it counts through."""
    counted = _names(loop.target) if isinstance(loop, ast.For) else set()
    if any(isinstance(node, ast.For) and node is not loop and _called_in(node, name) for node in ast.walk(loop)):
        return True
    called = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    members = (node.slice for node in called if isinstance(node, ast.Subscript) and _is_list(node.value, name))
    return any(isinstance(index, ast.Constant) or not counted & _names(index) for index in members)


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
