"""Private names of megatron-fsdp 0.6, each with its reason: which parameters are in place, where backward begins."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def use_raw_parameters(wrapper: Any) -> None:
    """Put the parameters that compute in place; the library does so in a forward pass of its wrapper, which is ours."""
    wrapper._replace_param_with_raw_if_needed()


def use_parameters_of_optimizer(wrapper: Any) -> None:
    """Put the parameters that the optimizer has in place; the library does so behind a backward pass."""
    wrapper._replace_param_with_distributed_if_needed()


def exchange_parameters_of_optimizer(wrapper: Any, others: Mapping[str, nn.Parameter]) -> None:
    """Let the library put ``others`` in place of the parameters of those names that it made for the optimizer."""
    was_in_place = wrapper.is_param_fsdp_distributed
    use_raw_parameters(wrapper)
    held = wrapper.param_and_grad_buffer.optimizer_named_parameters
    for i, (name, parameter) in enumerate(held):
        if name in others:
            for noted in ("orig_param", "megatron_fsdp_dist_index", "megatron_fsdp_slice", "reset_attribute"):
                if hasattr(parameter, noted):
                    setattr(others[name], noted, getattr(parameter, noted))
            held[i] = (name, others[name])
    if was_in_place:
        use_parameters_of_optimizer(wrapper)


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


def free_behind_hooks(wrapper: Any) -> None:
    """Let the library mark the beginning of a unit in front of forward pre-hooks that were there before its own.

    Where the backward pass reaches that mark, the unit is freed, and what such a hook computes from parameters of the
    unit (the weight, in ``torch.nn.utils.weight_norm``) has yet to go through its backward pass.
    """
    for name, handle in wrapper.forward_pre_hooks.items():
        if name.endswith(" register post-backward hook"):
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)


def keep_ties(wrapper: Any) -> None:
    """Let the library follow all names of a shared parameter when it puts others in place.

    It goes through ``named_parameters()`` meanwhile, which passes over what it has seen: of a third name on (the
    embeddings of an encoder-decoder) it leaves the parameters that were there.
    """
    held = (wrapper.raw_param, dict(wrapper.param_and_grad_buffer.optimizer_named_parameters))
    firsts = {id(parameter): name for named in held for name, parameter in named.items()}
    names = ((name, firsts[id(p)]) for name, p in wrapper.module.named_parameters(remove_duplicate=False))
    ties = [(*_owner(wrapper.module, name), first) for name, first in names if name != first]

    def reestablish(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        for owner, name, first in ties:
            setattr(owner, name, new[first])
            hand_over_at_the_end([new[first]])

    wrapper._reestablish_shared_weights = reestablish
    reestablish(*held)


def hand_over_at_the_end(parameters: Iterable[Any]) -> None:
    """Let the library take gradients of ``parameters`` at the end of a backward pass, when they are complete."""
    for parameter in parameters:
        parameter._is_shared = True


def is_handed_over_at_the_end(parameter: Any) -> bool:
    """Tell whether :func:`hand_over_at_the_end` was called with ``parameter``."""
    return getattr(parameter, "_is_shared", False)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def keep_units_gathered(wrapper: Any) -> None:
    """Take away the hooks by which a unit is freed behind its forward pass. Where parameters are not sharded they free
    nothing, and have it gathered again, forwards and backwards, in the order in which a rank calls it.

    Raises:
        RuntimeError: if there is none, which another release may call differently.
    """
    found = [handle for name, handle in wrapper.forward_hooks.items() if name.startswith("release module ")]
    if not found:
        raise RuntimeError(
            "megatron-fsdp has no hook called 'release module ...'; use a release from 0.6 on, below 0.7"
        )
    for handle in found:
        handle.remove()


def wrap_reduction(wrapper: Any, reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Let the library call ``reduce`` where it would send the gradients of a group of buckets; return its own way."""
    pipeline = wrapper.grad_reduce_pipeline
    own = pipeline._bucket_group_gradient_reduce
    pipeline._bucket_group_gradient_reduce = reduce
    return own


def abandon_pass(wrapper: Any) -> None:
    """Let the library forget a backward pass that an exception has ended: what it waited for, and that one runs."""
    pipeline = wrapper.grad_reduce_pipeline
    pipeline.wait_for_previous_grad_reduce(0)
    for ready in pipeline.bucket_grad_ready_params:
        ready.clear()
    pipeline.reset()
    for parameter in wrapper.raw_param.values():
        parameter.grad = None
    wrapper._root_pre_backward_hook_issued = False


def check_gathers_of_backward(wrapper: Any, check: Callable[[], None]) -> None:
    """Call ``check`` before the library gathers for a backward pass a unit that has the optimizer's parameters in
    place, of which it knows nothing there.
    """
    own = wrapper.all_gather_and_wait_parameters_ready

    def checked(*args: Any, bwd: bool = False, **kwargs: Any) -> None:
        if bwd and wrapper.is_param_fsdp_distributed:
            check()
        own(*args, bwd=bwd, **kwargs)

    wrapper.all_gather_and_wait_parameters_ready = checked


def gather_for_backward(wrapper: Any, unit: nn.Module) -> None:
    """Gather ``unit`` for its backward pass as the library's own hook on its output does, unless that has come."""
    from megatron_fsdp.megatron_fsdp import PrefetchOrder, TrainingState

    parameters = list(unit.parameters())
    if all(p.untyped_storage().size() > 0 or p.numel() == 0 for p in parameters):
        return
    for part in unit.modules():
        part._training_state = TrainingState.PRE_BACKWARD
    order = PrefetchOrder.BACKWARD_PASS_ORDER
    wrapper.all_gather_and_wait_parameters_ready(parameters, prefetch_order=order, bwd=True)


@contextmanager
def whole_rows() -> Generator[None, None, None]:
    """Let the library lay out buffers within this context so that no shard ends within a row of a parameter.

    Shards end at multiples of a number that all widths divide. Parameters smaller than that it puts one behind the
    other, over such an end, too, and the view of a part of a row is an error then: factors of adapters on layers of
    unlike widths, for example.
    """
    from megatron_fsdp import param_and_grad_buffer as library

    own = library.build_data_parallel_buffer_index

    def build(
        elements: Any,
        rank: int,
        ranks: int,
        is_sharded: bool,
        config: Any,
        bucket_id: int = 0,
        chunk_size_factor: int = 1,
    ) -> tuple[Any, Any, Any]:
        found = own(elements, rank, ranks, is_sharded, config, bucket_id, chunk_size_factor)
        items, bucket, _ = found
        is_whole = config.data_parallel_sharding_strategy == "no_shard"
        if is_whole or not any(_cuts_a_row(item, bucket.size // ranks) for item in items.values()):
            return found
        end = _move_from_ends(items, chunk_size_factor)
        size = -(-end // (ranks * chunk_size_factor)) * ranks * chunk_size_factor
        bucket = bucket._replace(size=size, items=list(items.values()))
        return items, bucket, library._get_dp_buffer_shard_bucket_index(bucket, is_sharded, ranks, rank)

    library.build_data_parallel_buffer_index = build
    try:
        yield
    finally:
        library.build_data_parallel_buffer_index = own


def _move_from_ends(items: dict[int, Any], chunk: int) -> int:
    """Move parameters of which a row lies on both sides of a multiple of ``chunk`` behind all others.

    Returns:
        where the last one ends.
    """
    end = max(item.global_data_index + item.size for item in items.values())
    for key in [key for key, item in items.items() if _cuts_a_row(item, chunk)]:
        if -end % chunk < items[key].size:
            end = -(-end // chunk) * chunk
        items[key] = items[key]._replace(global_data_index=end)
        end += items[key].size
    return end


def _cuts_a_row(item: Any, chunk: int) -> bool:
    before = -item.global_data_index % chunk  # elements in front of the first multiple
    return before < item.size and before % item.shape[1:].numel() != 0
