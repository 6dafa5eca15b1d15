"""Runs hooks of ``register_post_accumulate_grad_hook`` on what FSDP2 has reduced as autograd does: once per pass.

A layer that is called twice in a step, and a head that no rank has used::

    one process    hook(g1 + g2)                       no hook
    FSDP2          hook(g2), hook(what it left + g1)   hook(0)
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

HANDS_ON = frozenset({f"{RegisterPostBackwardFunction.__name__}Backward", "RegisterFSDPBackwardFunctionBackward"})
"""Names of the nodes of a graph through which all goes that enters a module, of FSDP2 and of Megatron-FSDP."""


class HooksOnSums:
    """Hooks of a group's parameters: FSDP2 runs them with each of its reductions, here they wait for the last one.

    That is the one behind which no forward pass is left that no backward pass has come through, or else the end of the
    backward pass.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.graphs: int | None = None  # not counted until there are hooks
        self.waiting: dict[Any, None] = {}

    def reduce(self, reduce: Callable[[], None], trained: Sequence[Any], in_doubt: Container[Any]) -> None:
        """Call ``reduce`` for the parameters ``trained``; hooks of those ``in_doubt`` wait for the end."""
        hooked = {held: hooks for held in trained if (hooks := held.sharded_param._post_accumulate_grad_hooks)}
        if self.graphs is not None:
            self.graphs = max(self.graphs - 1, 0)  # 0: a graph that is kept is gone through again
        later = {held: hooks for held, hooks in hooked.items() if self.graphs != 0 or held in in_doubt}
        for held in hooked:
            self.waiting.pop(held, None)
        for held in later:
            held.sharded_param._post_accumulate_grad_hooks = {0: partial(self.wait, held)}
        try:
            reduce()
        finally:
            for held, hooks in later.items():
                held.sharded_param._post_accumulate_grad_hooks = hooks

    def wait(self, held: Any, parameter: torch.Tensor) -> None:
        """Note that hooks of a parameter are due; takes their place."""
        self.waiting[held] = None

    def end(self) -> None:
        """Run what waits, on gradients that are there."""
        waiting, self.waiting = self.waiting, {}
        for parameter in (held.sharded_param for held in waiting):
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                if parameter.grad is not None:
                    hook(parameter)
        if waiting and self.graphs is None:
            self.graphs = 0
            self.group.post_forward = partial(self.count_graph, self.group.post_forward)

    def count_graph(self, post_forward: Callable[..., Any], *args: Any) -> Any:
        """Call ``post_forward`` of a pass through which a backward pass may come."""
        assert self.graphs is not None
        self.graphs += torch.is_grad_enabled()
        return post_forward(*args)


def edges_behind(node: Any, output: int) -> list[tuple[Any, int]]:
    """List where the ``output`` of a node of an autograd graph comes from, as node and output.

    FSDP2 and Megatron-FSDP hand on all that enters a module by one node, in order.
    """
    edges = [(before, number) for before, number in node.next_functions]
    return edges[output : output + 1] if node.name() in HANDS_ON else edges
