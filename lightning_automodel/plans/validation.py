"""Checks that the tensor-parallel size fits a model, before anything is split."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel.modules.four_bit import four_bit_layers
from lightning_automodel.modules.heads import HEADS, KEY_VALUE_HEADS
from lightning_automodel.modules.matrices import WIDTH_OF_VIEW
from lightning_automodel.modules.structure import KEY_VALUE_PROJECTIONS, configs_of_layers, kv_heads, text_config
from lightning_automodel.modules.wrappers import name_without_wrappers
from lightning_automodel.plans.counts import Count, check_counts
from lightning_automodel.plans.derivation import derive_layout
from lightning_automodel.plans.layout import Layout
from lightning_automodel.plans.selection import known_rules, select_plan, wildcard
from lightning_automodel.plans.styles import Leave


def validate_tp_mesh(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Checks that the tp axis fits the heads and the packed matrices of ``model``, layer by layer.

    Args:
        model: its parameters may be on the meta device.
        tp_mesh: the tp axis.

    Raises:
        ValueError: naming the counts that the size does not divide, and the sizes that fit.
    """
    layout = derive_layout(model, select_plan(model), tp_mesh.size()) if known_rules(model) else Layout()
    validate_tp(model, tp_mesh.size(), layout)


def validate_tp_mesh_for_nemotron_nas(model: nn.Module, tp_size: int) -> None:
    """Checks ``tp_size`` against the heads of every layer of a model whose layers a search chose (``block_configs``).

    Raises:
        ValueError: naming the layers whose heads ``tp_size`` does not divide, and the sizes that fit.
    """
    check_counts(
        type(model).__name__, tp_size, [*counts_of_config(text_config(model)), *_counts_of_nas(text_config(model))]
    )


def validate_tp(model: nn.Module, tp: int, layout: Layout) -> None:
    """Checks what ``layout`` splits; the vocabulary and unpacked feed-forward widths need not divide evenly.

    Nor need heads (``plans/uneven_heads.py``). Where nothing is known of a model its config tells what must.

    Raises:
        ValueError: naming the counts that ``tp`` does not divide, and the sizes that fit.
    """
    config, counts = text_config(model), list(_counts_of_layout(model, layout))
    if not layout.parameters:
        counts += [*counts_of_config(config), *_counts_of_nas(config)]
    check_counts(type(model).__name__, tp, counts)


def counts_of_config(config: Any) -> Iterator[Count]:
    """Count the heads of a model's layers by its config."""
    for part in configs_of_layers(config):
        heads = getattr(part, "num_attention_heads", None)
        if isinstance(heads, int):
            yield Count("num_attention_heads", heads)
        key_value_heads = getattr(part, "num_key_value_heads", None)
        if isinstance(key_value_heads, int) and key_value_heads > 0:
            yield Count("num_key_value_heads", key_value_heads, shared=True)


def _counts_of_nas(config: Any) -> Iterator[Count]:
    for i, block in enumerate(getattr(config, "block_configs", None) or ()):
        group = _field(_field(block, "attention"), "n_heads_in_group")
        if isinstance(group, int):
            heads = config.num_attention_heads // group
            yield Count(f"num_attention_heads / block_configs[{i}].attention.n_heads_in_group", heads, shared=True)


def _field(holder: Any, name: str) -> Any:
    """Reads a field of a dict or an object: remote code writes configs either way."""
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def _counts_of_layout(model: nn.Module, layout: Layout) -> Iterator[Count]:
    """Collects what the modules themselves say, layer by layer: heads, divided attributes, and packed matrices."""
    for name, attributes in layout.attributes.items():
        for attribute in (*HEADS, WIDTH_OF_VIEW):
            if attribute in attributes:
                whole, shared = getattr(model.get_submodule(name), attribute), attribute in KEY_VALUE_HEADS
                yield Count(f"{wildcard(name)}.{attribute}", whole, shared)
    for name, _, form in four_bit_layers(model):
        placement = layout.parameters[f"{name}.weight"].placement
        if isinstance(placement, Shard | StridedShard) and placement.dim == 1:
            halves = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            blocks = form.shape[1] // form.block // halves
            yield Count(f"blocks of {form.block} weights with one scale in a row of {wildcard(name)}", blocks)
    gathered = {name_without_wrappers(n) for n, found in layout.modules.items() if found.leave is Leave.GATHER}
    for name, parameter in layout.parameters.items():
        placement, shape = parameter.placement, model.get_parameter(name).shape
        if isinstance(placement, StridedShard):
            width = shape[placement.dim] // placement.split_factor
            yield Count(f"width of each of the {placement.split_factor} matrices in {wildcard(name)}", width)
        owner = name_without_wrappers(name.rpartition(".")[0])
        parent, _, projection = owner.rpartition(".")
        if (
            projection in KEY_VALUE_PROJECTIONS
            and owner not in gathered
            and (parameter.shared_heads or placement == Shard(0))
        ):
            heads = kv_heads(model.get_submodule(parent))
            if heads is not None:
                yield Count(f"key/value heads of {wildcard(parent)}", heads, shared=True)
