"""Finds rules for the linear layers in parts of blocks for which nothing else tells any: mixers of Mamba, RWKV, xLSTM.

::

    x [.., in]  ->  COPY  ->  x @ W[rows of rank]  ->  GATHER  ->  [.., out]      colwise_gather_output

Each layer takes and gives all features, so what stands between layers computes as on one process, whatever it is. A
rank stores its part of the matrices and computes its part of their products; all else each rank repeats.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_automodel._compat.torch.modules import (
    backward_hooks_of,
    gradient_hooks_of,
    hooks_of,
    own_children,
    own_parameters,
)
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.matrices import Matrix, out_features
from lightning_automodel.modules.reachable_code import names_in, reads_matrix_of
from lightning_automodel.modules.structure import find_towers, names_around, nearest_config, outermost
from lightning_automodel.plans.conventions import blocks_to_plan
from lightning_automodel.plans.known_code import is_known

_STYLE = "colwise_gather_output"

_PARAMETERS = {"weight", "bias"}

_PRODUCT = {"F", "T", "addmm", "bias", "linear", "nf", "size", "torch", "view", "weight"}
"""All names in the code of a product with the whole matrix: what has others (groups, gates) may not be cut by rows."""

_PART_OF_SQUARE = 4
"""A layer of fewer numbers than a quarter of the stream's width squared (a router) travels for longer than it saves."""


def plan_of_single_layers(model: nn.Module, planned: Iterable[str], named: Iterable[str]) -> dict[str, str]:
    """Collect the rules for the large linear layers in parts of a model's blocks in which nothing has a rule.

    Left out are layers whose matrices code or hooks read beside the layer (fused kernels of Mamba), those that stand in
    several places, code of a user's, and towers, whose streams are narrow.

    Args:
        model: its parameters may be on the meta device.
        planned: modules and parameters for which the model's own plan has rules.
        named: the same, and those that have other rules.

    Returns:
        name of a layer to style, without wildcards.
    """
    named = set(named)
    towers = list(find_towers(model))
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    rules: dict[str, str] = {}
    for name, block in blocks_to_plan(model, planned).items():
        width = getattr(nearest_config(model, name), "hidden_size", None)
        if name in named or outermost(towers, name) is not None or not _is_of_stream(block, width):
            continue
        kinds = frozenset(map(type, block.modules()))
        for part in _parts_without_rules(model, name, named):
            for full, layer in _plain_layers(model.get_submodule(part), part):
                is_large = width is None or layer.weight.numel() * _PART_OF_SQUARE >= width**2
                if is_large and places[id(layer.weight)] == 1 and not reads_matrix_of(full.rpartition(".")[2], kinds):
                    rules[full] = _STYLE
    return rules


def _is_of_stream(block: nn.Module, width: int | None) -> bool:
    """Tell whether a block writes a stream of ``width``: others are those of towers without a config of their own."""
    layers = [layer for layer in block.modules() if isinstance(layer, Matrix)]
    return is_known(block) and (width is None or any(out_features(layer) == width for layer in layers))


def _parts_without_rules(model: nn.Module, name: str, named: set[str]) -> Iterator[str]:
    """Name the outermost modules in a block in which nothing has a rule.

    What computes itself with a layer that has one is no such module: it may have a rank's features.
    """
    stops, around = {*named, *(other.rpartition(".")[0] for other in named)}, names_around(named)
    waiting = [name]
    while waiting:
        outer = waiting.pop()
        for child_name, child in model.get_submodule(outer).named_children():
            full = f"{outer}.{child_name}"
            if full in stops or isinstance(child, Matrix):
                continue
            if full in around:
                waiting.append(full)
            elif all(map(_is_seen, child.modules())):
                yield full


def _is_seen(module: nn.Module) -> bool:
    """Tell whether the code of a module is known, and is no attention of torch's, which reads the matrix of a layer."""
    return is_known(module) and not isinstance(module, nn.MultiheadAttention)


def _plain_layers(part: nn.Module, name: str) -> Iterator[tuple[str, Matrix]]:
    """Yield the linear layers of a module that multiply with one parameter, and do nothing else."""
    for full, layer in part.named_modules(prefix=name):
        if isinstance(layer, Matrix) and own_parameters(layer).keys() == _PARAMETERS and not own_children(layer):
            code = getattr(code_of(layer), "__code__", None)
            if code is not None and names_in(code) <= _PRODUCT and not _is_watched(layer):
                yield full, layer


def _is_watched(layer: Matrix) -> bool:
    """Tell whether hooks may look at the matrix or its gradient, or the parameter is of another kind than torch's."""
    parameters = [parameter for parameter in own_parameters(layer).values() if parameter is not None]
    hooks = [*hooks_of(layer), *backward_hooks_of(layer), *(h for p in parameters for h in gradient_hooks_of(p))]
    return bool(hooks) or any(type(parameter) is not nn.Parameter for parameter in parameters)
