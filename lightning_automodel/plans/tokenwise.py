"""Tells whether tokens may meet in the code of a module: read off the source, where no table has measured it.

::

    residual + self.mlp(self.norm(x))           sums, products, children, activations      tokens stay apart
    x.pow(2).mean(-1)                           what works on the last dimension           tokens stay apart
    q @ k.transpose(-2, -1), x[:, 1:], cumsum   anything else                              tokens may meet

Whose code it is, :mod:`~lightning_automodel.plans.known_code` tells. Of torch's modules it is known which ones work on
features alone.
"""

import ast
import inspect
import textwrap
from typing import Any

from torch import Tensor, nn

from lightning_automodel.modules.authors import place_of
from lightning_automodel.modules.forward import code_of, codes_of
from lightning_automodel.plans.adapters import unknown_variants
from lightning_automodel.plans.known_code import PLAIN, functions_of_users, is_activation, is_measured

_OF_TORCH = "torch.nn."
_APART = {
    *("torch", "nn", "functional", "F", "math", "gelu", "silu", "relu", "sigmoid", "tanh", "softplus"),
    *("leaky_relu", "elu", "dropout", "linear", "layer_norm", "rms_norm", "square", "pow", "sqrt", "rsqrt"),
    *("exp", "log", "abs", "clamp", "neg", "add", "sub", "mul", "div", "add_", "mul_", "to", "float"),
    *("type_as", "dtype", "device", "contiguous", "float32", "bfloat16", "float16", "training", "get", "pop"),
    "append",
}
_ON_LAST = {"chunk", "split", "mean", "sum", "var", "norm", "softmax", "cat"}
_BUILTINS = {"isinstance", "int", "float", "tuple", "bool", "getattr", "hasattr"}
_NEVER = (ast.For, ast.While, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.MatMult)


def keeps_tokens_apart(module: nn.Module) -> bool:
    """Tell whether the forward pass of ``module`` itself, its children aside, treats every token alone."""
    if is_measured(module):
        is_of_torch = place_of(code_of(module)).startswith(_OF_TORCH)
        is_apart = _works_on_features(module) if is_of_torch else not unknown_variants(module)
        return is_apart and all(_reads_apart(function, module) for function in functions_of_users(module))
    return all(_reads_apart(code, module) for code in codes_of(module))


def _reads_apart(function: Any, module: nn.Module) -> bool:
    body = _body(function)
    return body is not None and _are_apart(body, module)


def _works_on_features(module: nn.Module) -> bool:
    """Tell whether a module of torch's works on the last dimension of [batch, seq, features], or on single elements."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, PLAIN):
        return True
    is_alone = is_activation(module) and not isinstance(module, nn.Softmax2d)
    return is_alone and next(module.parameters(), None) is None and getattr(module, "dim", -1) == -1


def loops_keep_tokens_apart(holder: nn.Module) -> bool:
    """Tell whether the loops in which ``holder`` runs its blocks do nothing else in which tokens may meet."""
    if is_measured(holder):
        return True
    body = _body(code_of(holder)) or []
    loops = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.For)]
    called = [child for loop in loops for statement in loop.body for child in _children_in(statement, holder)]
    are_apart = all(map(keeps_tokens_apart, (inner for child in called for inner in child.modules())))
    return bool(loops) and are_apart and all(_are_apart(loop.body, holder) for loop in loops)


def _children_in(statement: ast.stmt, module: nn.Module) -> list[nn.Module]:
    names = [node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute) and _is_of_self(node)]
    return [child for name in names if isinstance(child := getattr(module, name, None), nn.Module)]


def takes_no_tokens_apart(model: nn.Module, inner: str) -> bool:
    """Tell whether the forward pass of ``model`` picks no tokens by an index, and has nothing else that reads on.

    But for those that its caller asks for with ``logits_to_keep``: what reads this knows of that argument. Its own
    functions are not read, and what it calls twice, or adds to what it had before, may be of sequences of two lengths.

    Args:
        model: whose code is read.
        inner: its attribute that gives hidden states.
    """
    if is_measured(model):
        return True
    body = _body(code_of(model)) or []
    nodes = [node for statement in body for node in ast.walk(statement)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{inner}"]
    if len(calls) != 1:
        return False
    kept = {name for node in nodes if isinstance(node, ast.Assign) for name in _names_of_kept(node)}
    return not _computes_with_what_was_before(body, calls[0]) and not any(
        isinstance(node, (*_NEVER, ast.FunctionDef))
        or (isinstance(node, ast.Subscript) and not _takes_all(node.slice, kept))
        for node in nodes
    )


def _computes_with_what_was_before(body: list[ast.stmt], call: ast.Call) -> bool:
    """Tell whether statements behind that of ``call`` compute with a variable that was there before it."""
    place = next(i for i, statement in enumerate(body) if any(node is call for node in ast.walk(statement)))
    before = {
        node.id
        for statement in body[:place]
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    operations = [
        node
        for statement in body[place:]
        for node in ast.walk(statement)
        if isinstance(node, ast.BinOp | ast.AugAssign)
    ]
    operands = [x for node in operations for x in ast.iter_child_nodes(node)]
    return any(isinstance(operand, ast.Name) and operand.id in before for operand in operands)


def _names_of_kept(node: ast.Assign) -> list[str]:
    """List the variables that an assignment makes of ``logits_to_keep``."""
    is_kept = any(isinstance(name, ast.Name) and name.id == "logits_to_keep" for name in ast.walk(node.value))
    return [target.id for target in node.targets if isinstance(target, ast.Name)] if is_kept else []


def _takes_all(index: ast.expr, kept: set[str]) -> bool:
    """Tell whether an index is of a tuple or a dict, or takes all tokens but for those that were asked for."""
    if isinstance(index, ast.Tuple):
        return all(ast.unparse(part) == ":" or ast.unparse(part) in kept for part in index.elts)
    return isinstance(index, ast.Constant) and isinstance(index.value, int | str)


def _body(function: Any) -> list[ast.stmt] | None:
    try:  # of a decorator's code: its function has the source of what it decorates
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "__code__", function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else None


def _are_apart(body: list[ast.stmt], module: nn.Module) -> bool:
    return all(_is_apart(node, module) for statement in body for node in ast.walk(statement))


def _is_apart(node: ast.AST, module: nn.Module) -> bool:
    if isinstance(node, _NEVER):
        return False
    if isinstance(node, ast.Subscript):  # one index is of a tuple or of the batch, a second one may be of tokens
        is_first = not isinstance(node.value, ast.Subscript)
        return is_first and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int | str)
    if isinstance(node, ast.Attribute):
        return node.attr in _APART | _ON_LAST or _is_known(node, module)
    if isinstance(node, ast.Call):
        return _calls_apart(node, module)
    return True


def _is_known(node: ast.Attribute, module: nn.Module) -> bool:
    """Tell whether an attribute of the module is a child, a number, or a vector of features."""
    if not _is_of_self(node):
        return False
    value: Any = getattr(module, node.attr, None)
    if isinstance(value, Tensor):
        return value.ndim <= 1
    return value is None or isinstance(value, nn.Module | int | float | str)


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _calls_apart(call: ast.Call, module: nn.Module) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _BUILTINS
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr not in _ON_LAST or _is_known(call.func, module):
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(ast.unparse(value) == "-1" for value in given)
