"""Private names of megatron-fsdp 0.6, each with its reason: which parameters are in place, where backward begins."""

from typing import Any


def use_raw_parameters(wrapper: Any) -> None:
    """Put the parameters that compute in place; the library does so in a forward pass of its wrapper, which is ours."""
    wrapper._replace_param_with_raw_if_needed()


def use_parameters_of_optimizer(wrapper: Any) -> None:
    """Put the parameters that the optimizer has in place; the library does so behind a backward pass."""
    wrapper._replace_param_with_distributed_if_needed()


def remove_root_hooks(wrapper: Any) -> int:
    """Take away the hooks by which the library finds the beginning of a backward pass: they see tensors only, no dicts.

    Returns:
        how many they were.

    Raises:
        RuntimeError: if there is none, which another release may call differently.
    """
    found = [handle for name, handle in wrapper.backward_pre_hooks.items() if name.endswith("_root_pre_backward")]
    if not found:
        raise RuntimeError("megatron-fsdp has no hook called *_root_pre_backward; use a release from 0.6 on, below 0.7")
    for handle in (*found, wrapper._root_pre_backward_hook_handle):
        handle.remove()
    return len(found)
