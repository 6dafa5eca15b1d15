"""Initial weights on a mesh against one process: drawn from the meta device, and real ones cut into parts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from lightning_automodel.loading import materialize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from tests.support.families import image_text_families, tiny_config

CPU = torch.device("cpu")


def initial_difference(family: str) -> tuple[float, str]:
    """Runs on two ranks, with tp=2 and with dp_shard=2.

    Returns:
        the largest absolute difference from one process, which must be 0, and what has it.
    """
    auto_class: Any = AutoModelForImageTextToText if family in image_text_families() else AutoModelForCausalLM
    config = tiny_config(family)
    found = [(0.0, "")]
    for sizes in ({"tp": 2}, {"dp_shard": 2}):
        found.append(_drawn(auto_class, config, sizes))
        found.append(_cut(auto_class, config, sizes))
    return max(found)


def _drawn(auto_class: Any, config: PreTrainedConfig, sizes: dict[str, int]) -> tuple[float, str]:
    """From the meta device: transformers' own initialization of the whole model, with rank 0's random numbers, and the
    constructor's values of what that leaves.
    """
    expected, actual = _on_meta(auto_class, config), _on_meta(auto_class, config)
    expected.to_empty(device=CPU)
    expected.tie_weights(recompute_mapping=False)
    with torch.no_grad():
        for tensor in _tensors(expected).values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # what nothing initializes shows
    torch.manual_seed(0)
    expected.initialize_weights()
    expected.tie_weights(recompute_mapping=False)
    left = {name: tensor for name, tensor in _tensors(expected).items() if tensor.isnan().any()}
    if left:
        constructed = _tensors(type(expected)(config))
        for name, tensor in left.items():
            tensor.data.copy_(constructed[name])
    parallelize(actual, build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu"))
    torch.manual_seed(dist.get_rank())
    materialize(actual, CPU)
    return _largest(f"drawn on {sizes}: ", actual, expected)


def _cut(auto_class: Any, config: PreTrainedConfig, sizes: dict[str, int]) -> tuple[float, str]:
    """Real weights, different on every rank: rank 0's count."""
    torch.manual_seed(0)
    expected = auto_class.from_config(config, dtype=torch.float32)
    torch.manual_seed(dist.get_rank())
    actual = auto_class.from_config(config, dtype=torch.float32)
    parallelize(actual, build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu"))
    return _largest(f"cut on {sizes}: ", actual, expected)


def _on_meta(auto_class: Any, config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=torch.float32)


def _largest(prefix: str, actual: nn.Module, expected: nn.Module) -> tuple[float, str]:
    found = _values(actual)
    return max(
        ((_difference(found[name], value), prefix + name) for name, value in _values(expected).items()),
        default=(0.0, ""),
    )


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.is_meta or actual.shape != expected.shape:
        return float("inf")
    if torch.equal(actual, expected) or not actual.numel():
        return 0.0
    return (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max().item()


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by name."""
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in _tensors(model).items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
