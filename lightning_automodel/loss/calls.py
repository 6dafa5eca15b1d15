"""What torch calls a function that a tensor overrides, and which of them look at no element."""

from collections.abc import Callable
from typing import Any

DESCRIPTIONS = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "data"),
    *("size", "dim"),
    *("ndimension", "numel", "nelement", "stride", "element_size", "itemsize", "nbytes", "is_floating_point"),
    *("is_complex", "is_signed", "is_contiguous", "get_device", "requires_grad_", "retain_grad", "retains_grad"),
    *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_inference", "is_conj", "is_neg"),
    *("is_sparse_csr", "is_mkldnn", "is_mps", "is_xpu", "is_vulkan", "is_ipu", "is_xla", "is_maia", "is_mtia"),
    *("_version", "output_nr", "names", "name", "has_names", "dim_order", "__hash__", "__repr__", "__dir__"),
    *("_grad", "_grad_fn", "_base", "_is_view", "_backward_hooks", "register_hook", "_post_accumulate_grad_hooks"),
}
"""What says something about the tensor as a whole, and looks at no element."""


def name_of(func: Callable) -> str:
    """Return the name of a function, method or property; what sets or deletes a property has a suffix."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner: Any = func.__self__  # type: ignore[attr-defined]
        attribute = getattr(owner.fget if isinstance(owner, property) else owner, "__name__", "")
        return attribute if name == "__get__" else f"{attribute}.{name}"
    return name
