"""Gradients of gradients (``create_graph=True``): which backward passes are differentiated, and which cannot be."""

import torch


def is_differentiated() -> bool:
    """Tell whether the running backward pass builds a graph of its own. A compiled one does not."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def refuse_second_order(what: str, way_out: str) -> None:
    """Refuse a backward pass that builds a graph, from which terms would be missing.

    Raises:
        NotImplementedError: if the running one does.
    """
    if is_differentiated():
        raise NotImplementedError(f"create_graph=True: {what} gives no gradient of a gradient; {way_out}")
