"""Splits a model over the tp axis: parameters are stored as DTensors, and every forward pass computes on local tensors.

    1. ``distribute_parameters``  each parameter becomes a DTensor on tp, by its layout
    2. ``install_collectives``    hooks around the planned modules and boundaries
    3. ``local_tensors.py``       during a block's forward pass its modules see ``parameter.to_local()``

A boundary: ``self_attn`` with 8 heads of width 2, two key/value heads and tp=4::

                       GPU 0        GPU 1        GPU 2        GPU 3
    hidden             0-7          0-7          0-7          0-7          features, whole on each rank
      |  copy_in: nothing; its four gradients are summed
    q_proj             heads 0-1    heads 2-3    heads 4-5    heads 6-7    column-parallel: rows of the weight
    k_proj, v_proj     head 0       head 0       head 1       head 1       stored whole: more ranks than heads
    attention          heads 0-1    heads 2-3    heads 4-5    heads 6-7
    o_proj             0-3          4-7          8-11         12-15        row-parallel: columns of the weight
      |  a term of the features 0-7 on each rank
      |  reduce_out: the four terms are summed; the gradient is whole already
    hidden             0-7          0-7          0-7          0-7

Everything is installed as forward hooks and instance attributes that a ``copy.deepcopy`` of the model carries along.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.distributed.collectives import copy_in, gather, reduce_out, shard_bounds, split
from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.matrices import is_turned
from lightning_automodel.modules.structure import class_names, find_blocks, outermost, text_config
from lightning_automodel.modules.wrappers import unwrapped
from lightning_automodel.parallel.given_containers import giving_back
from lightning_automodel.parallel.guards.hooks_of_users import WHOLE, warn_of_parts
from lightning_automodel.parallel.tensor.beside import EnteringBeside, install_beside, same_container
from lightning_automodel.parallel.tensor.local_tensors import install_local_tensors
from lightning_automodel.parallel.tensor.norms import install_norm, install_row_norm
from lightning_automodel.parallel.tensor.numbers_of_heads import install_head_biases, install_head_masks
from lightning_automodel.parallel.tensor.origins import message_within, note_entered, note_split
from lightning_automodel.parallel.tensor.partial_sums import follow_partial_sums
from lightning_automodel.parallel.tensor.recorded_shares import install_recorded_shares
from lightning_automodel.parallel.tensor.sequence_parallel import install_sequence_parallel
from lightning_automodel.parallel.tensor.sliced_draws import find_twins, install_sliced_draws
from lightning_automodel.parallel.tensor.stream import Stream
from lightning_automodel.parallel.tensor.trial_weights import is_whole_now, modules_to_try
from lightning_automodel.parallel.tensor.trials import Trial, is_tried_now
from lightning_automodel.parallel.tensor.written_inputs import install_written_inputs
from lightning_automodel.plans import Layout
from lightning_automodel.plans.styles import Enter, Leave

Transform = Callable[[Tensor], Tensor]
_OF_OTHERS = "outside of blocks, and with sequence_parallel=False of whole attention and feed-forward layers,"
_WHOLE_OUTSIDE = (f"Outputs {_OF_OTHERS}", f"Gradients {_OF_OTHERS}")


def apply_tensor_parallel(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    layout: Layout,
    *,
    is_final: bool = False,
    gathered_alone: Iterable[str] = (),
) -> None:
    """Splits ``model`` in place over ``tp_mesh`` (one axis). Parameters may be on the meta device.

    :func:`install_copies` is the last part of it, behind all that changes which rows reach a rank's experts.

    Args:
        model: whose parameters are plain.
        tp_mesh: one axis.
        layout: of ``model``.
        is_final: no stage after this one reduces gradients.
        gathered_alone: modules inside of blocks whose own parameters are there only while the module runs.
    """
    why = f"tp={tp_mesh.size()}{', sequence_parallel=True' if layout.sequence else ''}"
    whole = WHOLE if layout.sequence is None else _WHOLE_OUTSIDE
    seeing = list(_seeing_parts(model, layout))
    heads = [name for name, found in layout.modules.items() if found.enter is Enter.COPY and name not in seeing]
    warn_of_parts(model, seeing, why, whole, heads)
    twins, tried = find_twins(model), modules_to_try(model, layout, set(gathered_alone))
    for name, attributes in layout.attributes.items():
        model.get_submodule(name).__dict__.update(attributes)
    distribute_parameters(model, tp_mesh, layout)
    install_collectives(model, tp_mesh.get_group(), layout)
    streams: dict[str, Stream] = {}
    if layout.sequence is not None:
        streams = install_sequence_parallel(model, tp_mesh.get_group(), layout.sequence, layout.terms)
    install_written_inputs(model, layout, streams)
    install_head_masks(model, tp_mesh.get_group(), layout)
    install_head_biases(model, tp_mesh.get_group(), layout)
    install_recorded_shares(model, tp_mesh.get_group(), layout)
    install_beside(model, tp_mesh.get_group(), layout)
    install_local_tensors(model, tp_mesh, layout, streams, is_final=is_final, gathered_alone=gathered_alone)
    install_sliced_draws(model, tp_mesh.get_group(), twins, streams)
    note_split(model)
    follow_partial_sums(model, layout, [Trial(one, tp_mesh) for one in tried])
    cut = sum(not found.placement.is_replicate() for found in layout.parameters.values())
    stream = f", the stream cut on {len(streams)} blocks" if streams else ""
    log(
        f"{class_names(model)[0]}: tp={tp_mesh.size()} splits {cut} of {len(layout.parameters)} parameters, with "
        f"{len(layout.boundaries)} boundaries{stream}"
    )


def _seeing_parts(model: nn.Module, layout: Layout) -> Iterator[str]:
    """Find the modules whose inputs or outputs are slices or terms of a sum, and not what one process has there."""
    cut = list(find_blocks(model)) if layout.sequence is not None else layout.boundaries
    for name, _ in model.named_modules():
        owner = outermost(cut, name)
        if owner is not None and (owner != name or layout.sequence is not None):
            yield name


def distribute_parameters(model: nn.Module, tp_mesh: DeviceMesh, layout: Layout) -> None:
    """Replaces every parameter by a DTensor with its layout's placement; tied parameters stay tied.

    Values are sliced on each rank without communication, so they must be equal on all ranks.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is None:
                continue
            if parameter not in replaced:
                placement = layout.parameters[f"{module_name}.{name}" if module_name else name].placement
                replaced[parameter] = _distribute(parameter, tp_mesh, placement)
            own_parameters(module)[name] = replaced[parameter]


def _distribute(parameter: nn.Parameter, tp_mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    value = distribute_tensor(parameter.detach(), tp_mesh, [placement], src_data_rank=None)
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)  # flags of others, such as transformers' _is_hf_initialized
    return new


# ---- collectives -----------------------------------------------------------------------------------------------------


def install_collectives(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Puts the collectives of ``layout.modules`` around the modules that it names."""
    blocks = list(find_blocks(model))
    for name, module_layout in layout.modules.items():
        module = model.get_submodule(name)
        if module_layout.enter is Enter.EMBED:
            _install_embedding(module, group)
            continue
        if module_layout.enter is Enter.NORM:
            install_norm(module, group, name)
            continue
        if module_layout.enter is Enter.ROW_NORM:
            install_row_norm(module, group)
            continue
        is_told = module_layout.leave is Leave.NONE and outermost(blocks, name) is not None
        why = message_within(name, module, group.size()) if is_told else None
        if enter := _enter_function(module_layout.enter, group, why):
            module.register_forward_pre_hook(_Around(enter, every=False).enter, with_kwargs=True)
        if leave := _leave_function(module, module_layout.leave, group, model):
            all_outputs = module_layout.leave in (Leave.REDUCE_ALL, Leave.SPLIT_ROTARY)
            # Before the hooks of users, which are to see what a module gives on one process.
            module.register_forward_hook(_Around(leave, all_outputs).leave, prepend=True)


def install_copies(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Copies in what enters boundaries, inside of all hooks: a user's may go on with it beside the sum that leaves.

    Around what chooses the rows of a rank's experts, too (``parallel/experts``): all ranks have the same rows here.
    """

    def around(
        copies: "_Around | EnteringBeside", module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        given = [*args, *kwargs.values()]
        if not is_tried_now(module):
            args, kwargs = copies.enter(module, args, kwargs)
        if isinstance(copies, _Around):
            return forward(*args, **kwargs)
        return giving_back(given, [*args, *kwargs.values()], lambda: forward(*args, **kwargs))[0]

    for name, module_layout in layout.modules.items():
        if module_layout.enter is Enter.COPY_ALL:
            module = model.get_submodule(name)
            why = message_within(name, module, group.size())
            enter = EnteringBeside(name, group, why) if layout.terms else _Around(_copying_in(group, why), every=True)
            wrap_forward(module, partial(around, enter))


def _copying_in(group: ProcessGroup, why: str | None) -> Transform:
    return lambda x: note_entered(copy_in(x, group), why)


def _enter_function(enter: Enter, group: ProcessGroup, why: str | None) -> Transform | None:
    match enter:
        case Enter.COPY:
            return _copying_in(group, why)
        case Enter.SPLIT:
            return lambda x: split(x, -1, group)
        case Enter.DIVIDE:
            return lambda x: x / group.size()
        case _:
            return None


def _leave_function(module: nn.Module, leave: Leave, group: ProcessGroup, model: nn.Module) -> Transform | None:
    match leave:
        case Leave.REDUCE | Leave.REDUCE_ALL:
            return lambda x: reduce_out(x, group)
        case Leave.REDUCE_SPLIT:
            return lambda x: split(reduce_out(x, group), -1, group)
        case Leave.GATHER:
            size = _output_width(module)
            # Logits for a loss come from the head as a DTensor, or not at all (heads.py): these are whole already.
            return lambda x: x if x.shape[-1] == size else gather(x, -1, size, group)
        case Leave.SPLIT_ROTARY:
            return lambda x: split(x, 1 if x.ndim == 4 else -1, group)
        case Leave.COPY_ROTARY:
            rotary = text_config(model).qk_rope_head_dim
            return lambda x: torch.cat([x[..., :-rotary], copy_in(x[..., -rotary:], group)], -1)
        case _:
            return None


def _output_width(module: nn.Module) -> int:
    """Count the features that come out of the whole module: rows of a matrix, columns of an embedding."""
    module = unwrapped(module)
    weight = module.get_parameter("weight")  # a DTensor: the whole shape
    return weight.shape[1] if isinstance(module, nn.Embedding) or is_turned(module) else weight.shape[0]


class _Around:
    """The hooks around one planned module.

    Args:
        function: what is done to a tensor.
        every: to every floating-point argument, or every output; else to the first one.
    """

    def __init__(self, function: Transform, every: bool) -> None:
        self.function, self.every = function, every

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Change what enters: a forward pre-hook."""
        if is_whole_now():
            return args, kwargs
        if self.every:
            return tuple(map(self._change, args)), {name: self._change(x) for name, x in kwargs.items()}
        if args:
            return (self.function(args[0]), *args[1:]), kwargs
        first = next(name for name, x in kwargs.items() if isinstance(x, Tensor))
        return args, {**kwargs, first: self.function(kwargs[first])}

    def _change(self, value: Any) -> Any:
        return self.function(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Change what leaves: a forward hook."""
        if is_whole_now():
            return output
        if isinstance(output, Tensor):
            return self.function(output)
        if not isinstance(output, tuple | list):
            raise ValueError(_no_first_output(module, output))
        changed = map(self.function, output) if self.every else (self.function(output[0]), *output[1:])
        return same_container(output, changed)


def _no_first_output(module: nn.Module, output: Any) -> str:
    name = class_names(module)[0]
    return (
        f"the tensor-parallel plan splits a {name}, of whose output the ranks have parts, but it returns a "
        f"{type(output).__name__}, in which it is not known which values are to be summed. Return a tensor, or a tuple "
        f"or list with the features in the first place; or leave the {name} whole, with a rule 'replicate' for each of "
        "its layers in FSDP2Config(tp_plan={'extends': 'model', ...})"
    )


def _install_embedding(module: nn.Module, group: ProcessGroup) -> None:
    """Looks up the ids that this rank's rows hold, gives zeros for the others, and sums over tp.

    The module's own forward runs, with the true ids: an embedding that scales or normalizes its output, or replaces
    that of single tokens, does so with the whole result.
    """
    lookup = _SplitLookup(module.get_parameter("weight").shape[0], group)

    def around(module: nn.Module, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        with lookup:
            return forward(*args, **kwargs)

    wrap_forward(module, around)


class _SplitLookup(TorchFunctionMode):
    """Makes lookups in a table of ``rows`` rows whole within this context, where each rank holds a slice of them."""

    def __init__(self, rows: int, group: ProcessGroup) -> None:
        super().__init__()
        self.rows, self.group = rows, group

    def __deepcopy__(self, memo: dict) -> "_SplitLookup":
        return _SplitLookup(self.rows, self.group)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.embedding:
            return func(*args, **(kwargs or {}))
        return self._look_up(*args, **(kwargs or {}))

    def _look_up(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, **options: Any) -> Tensor:
        start, length = shard_bounds(self.rows, self.group.size(), self.group.rank())
        local = input - start
        held = (local >= 0) & (local < length)
        elsewhere = ~held & (input >= 0) & (input < self.rows)
        padding = padding_idx if padding_idx is None else padding_idx % self.rows - start
        options["padding_idx"] = padding if padding is not None and 0 <= padding < length else None
        if options.get("scale_grad_by_freq"):  # a row's gradient is divided by how often it is looked up here
            rows = functional.embedding(local[~elsewhere], weight, **options)
            whole = rows.new_zeros((*input.shape, rows.shape[-1])).index_put((~elsewhere,), rows)
            return reduce_out(whole, self.group)
        # An id outside of the vocabulary stays outside on every rank, and torch refuses it as on one process.
        output = functional.embedding(local.masked_fill(elsewhere, 0), weight, **options)
        return reduce_out(output.masked_fill(~held.unsqueeze(-1), 0), self.group)
