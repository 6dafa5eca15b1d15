"""torch's functions on nested containers of tensors; the module has no public name up to torch 2.15."""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]
