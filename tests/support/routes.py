"""Routes of tokens to experts that stay where they are: what is compared in bfloat16 is the arithmetic then.

A router chooses the k largest of its probabilities. Rounding reorders those that are near each other, and a token that
goes to another expert is no rounding error: a gradient can be off by a tenth for one token in a hundred.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ROUTER = "mlp.gate"  # of Qwen3-MoE: returns logits, weights and indices, [tokens, experts] and twice [tokens, k]


def routers(model: nn.Module) -> list[nn.Module]:
    """Find the routers, in the order of layers."""
    return [module for name, module in model.named_modules() if name.endswith(ROUTER)]


def note_routes(model: nn.Module) -> list[Tensor]:
    """Collect the indices that routers choose from now on, a tensor for each router and pass."""
    found: list[Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, args, output: found.append(output[2].detach()))
    return found


def hold_routes(model: nn.Module, routes: Sequence[Tensor]) -> list[RemovableHandle]:
    """Let each router choose what ``routes`` say, with its own weights for them, until the handles are removed."""
    return [
        router.register_forward_hook(lambda module, args, output, indices=indices: choose(module, output, indices))
        for router, indices in zip(routers(model), routes, strict=True)
    ]


def choose(router: Any, output: tuple[Tensor, Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh the experts at ``indices`` as the router weighs those of its own choice."""
    logits, weights, _ = output
    chosen = logits.float().softmax(-1).gather(-1, indices)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(weights.dtype), indices


def farthest(model: nn.Module, exact: nn.Module) -> float:
    """Find the largest distance of a gradient from the exact one, as a part of that one's norm."""
    found = []
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            gradient: Any = model.get_parameter(name).grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found.append(float((whole - parameter.grad).norm() / parameter.grad.norm()))
    return max(found)
