"""Says what is to be done where code of a user's meets shards: a gradient that nobody reduced, and torch's errors."""

from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel._compat.fsdp2.reduction import some_wait
from lightning_automodel._compat.fsdp2.units import unreduced_parameter

_WRITTEN = (
    "a forward pass writes into a parameter, in the place of which it sees a slice of tensor parallelism. Compute "
    "another tensor there (normalize(weight), weight.clamp(...)) and leave the parameter as it is; or change it "
    "between two steps, in on_train_batch_start"
)
_OUTSIDE = (
    "a parameter of a sharded model, or a layer inside of its blocks, meets plain tensors outside of the forward pass "
    "that gathers it. Call the model, or a part of it (its embedding, its decoder, a block, its head); what "
    "uses a layer of a block belongs into the model's own forward pass, by a subclass of its class. Of a parameter "
    "take parameter.full_tensor(), before the model is called (for a penalty on weights, or functional.embedding(ids, "
    "embedding.weight.full_tensor()), for example). What averages parameters into those of another model (a momentum "
    "encoder, a teacher) belongs before the first forward pass of the step, too, or into on_train_batch_start: behind "
    "it some of them are whole copies until the backward pass"
)
_BY_NAME = (
    "what the LightningModule holds itself ({name}) is a plain tensor within a step if it is read as self.{name}, and "
    "a DTensor if parameters() or named_parameters() give it. If it is not that: {instead}"
)
_INTO = (
    "a plain tensor goes into a sharded parameter or gradient. Make it like the other one, which draws and cuts it as "
    "one process does (p.grad.add_(torch.randn_like(p.grad)), torch.zeros_like(p)), or cut a whole one, the same on "
    "all ranks (distribute_tensor(whole, p.device_mesh, p.placements) of torch.distributed.tensor). What averages "
    "parameters into those of another model belongs before the first forward pass of the step, or into "
    "on_train_batch_start: behind it some of them are whole copies until the backward pass"
)
_BY_INDICES = (
    "shards do not take values by a mask or by indices (tensor[mask] = value); use "
    "tensor.masked_fill_(mask, value), or torch.where(mask, value, tensor)"
)
_LOADED = (
    "load_state_dict was given whole tensors for a model whose parameters are sharded; load them in __init__ or "
    "configure_model, before the model is made parallel"
)
_COPIED = (
    "a copy of a model that is parallel would share the groups and hooks of it; copy the model in configure_model (a "
    "teacher, a reference, an average), where each copy is made parallel for itself"
)
_BESIDE_ROWS = (
    "a parameter or gradient that Megatron-FSDP shards meets plain tensors, outside of their forward pass; "
    "let the model's own forward pass compute what reads weights (by a subclass of its class), use weight_decay of the "
    "optimizer for a penalty, or FSDP2TPStrategy, whose parameters have full_tensor()"
)
_ASKED = (
    "parameters that {does} are not those of which torch.autograd.grad is asked, so that it finds none{where}; "
    "take them from parameter.grad behind self.manual_backward(loss), or use DDPStrategy"
)
_OF_COPIES = (
    ". Hidden states of blocks that a model returns under cp or sequence_parallel=True are gathered copies, from which "
    "its loss does not come: it has no gradient with respect to them"
)
HELD = (
    "gradients of micro-batches within block_backward_sync() were not reduced over the data ranks, since no backward "
    "pass followed outside of it before the step; take the last backward pass of a step outside of it, also if its "
    "batch is to be left out ((0 * loss).backward(), say)"
)
_TRANSFORMED = (
    "torch.func (grad, vmap, jacrev) runs through a model that is sharded, which gathers and sums by means that its "
    "transforms do not follow; use torch.autograd.grad with respect to what enters the model, or DDPStrategy"
)
_TRANSFORMS = dict.fromkeys(("storage of TensorWrapper", "must override the setup_context staticmethod"), _TRANSFORMED)
_INSTEAD = {
    **_TRANSFORMS,
    "appears to not have been used in the graph": _ASKED.format(
        does="FSDP2 gathers", where=" of a model that is sharded over data ranks, or on one device"
    )
    + _OF_COPIES,
    "Output 0 of _CopyIn is a view and its base or another view of its base has been modified": _WRITTEN,
    "got mixed torch.Tensor and DTensor": _OUTSIDE,
    "_.Tensor got mixed torch.Tensor and DTensor": _INTO,  # add_, mul_; says more than the words before
    "on inputs with different meshes": _OUTSIDE,  # of units that are gathered behind a forward pass, and others
    "Sharding propagation failed for aten.view": (
        "the shards of a parameter or gradient are not those of its flattened form; compute with each tensor alone, or "
        "flatten tensor.full_tensor(), which all ranks have to call"
    ),
    "FSDP does not support deepcopy": _COPIED,
    "occurred : ('aten.copy_.default got mixed torch.Tensor and DTensor": _LOADED,  # says more than the first words
    "aten.index_put_.default: in-place operations that require placement changes": _BY_INDICES,
    "aten.index_put_.default does not have a sharding strategy registered": _BY_INDICES,  # torch 2.11
    "out of bounds for storage of size 0": (
        "the backward pass needs parameters that were freed. Either the loss reads nothing that the forward pass of "
        "their module returned, and a tensor that a hook or an attribute has kept; return from it all that the loss "
        "reads, or add that loss to one of what the model returns. Or the loss reads a parameter itself behind that "
        "pass (probabilities @ embedding.weight); take its full_tensor() before the model is called, or call the layer"
    ),
}

_INSTEAD_OF_ROWS = {
    **_TRANSFORMS,
    "out of bounds for storage of size 0": (
        "the backward pass needs parameters that Megatron-FSDP has freed: it begins at a tensor that their block did "
        "not return, such as one that a hook or an attribute has kept. Return from the block all that the loss reads, "
        "or add that loss to one of what the model returns; or use zero_dp_strategy=2, which keeps parameters whole"
    ),
    "appears to not have been used in the graph": _ASKED.format(does="Megatron-FSDP gathers", where=""),
    "got mixed torch.Tensor and DTensor": _BESIDE_ROWS,
    "occurred : ('aten.copy_.default got mixed torch.Tensor and DTensor": _LOADED,
    "an exception occurred : ('The size of tensor a": _LOADED,
    "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object": _COPIED,
}


def explain_use_of_shards(error: BaseException, of_rows: bool = False, own: Iterable[str] = ()) -> None:
    """Put the way out before the words of torch, where ``error`` is one that it raises of shards.

    Args:
        error: gets other words, in place.
        of_rows: shards are those of Megatron-FSDP, in uneven numbers of rows.
        own: names of parameters that the LightningModule holds itself, as its code reads them.
    """
    name = next(iter(own), None)
    if error.args and isinstance(text := error.args[0], str):
        for words, instead in (_INSTEAD_OF_ROWS if of_rows else _INSTEAD).items():
            if words in text and instead not in text:
                said = _BY_NAME.format(name=name, instead=instead) if name and instead is _OUTSIDE else instead
                error.args = (f"{said}. torch says: {text}", *error.args[1:])


def refuse_unreduced(module: nn.Module, units: Collection[FSDPModule]) -> None:
    """Check, when a step's gradients have been reduced, that no parameter has one that was not.

    Args:
        module: its names are those of the message.
        units: FSDP2's in ``module``.

    Raises:
        ValueError: naming the parameter, and the cause that is known.
    """
    found = unreduced_parameter(units)
    if found is None:
        return
    if some_wait(units):
        raise ValueError(HELD)
    owner, parameter = found
    name = next((name for name, part in module.named_modules() if part is owner), type(owner).__name__)
    raise ValueError(
        f"{name}.{parameter} has a gradient that was not reduced over the data ranks: the loss read a tensor that the "
        "forward pass of its module kept (on the module, in a list) and did not return, or a loss without what it "
        "returned; what a module returns tells when its gradients are complete. Return from forward all that the loss "
        "reads, and nothing else that requires a gradient; and where torch.utils.checkpoint runs a whole model, give "
        "it use_reentrant=False"
    )
