"""Translates between the style names of plans and the ``ParallelStyle`` objects of torch, in both directions."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel

from lightning_automodel.distributed.collectives import scale_gradient
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.modules.structure import find_names_of_ends
from lightning_automodel.plans.published import published_plan
from lightning_automodel.plans.styles import STYLES

_GATHERED: dict[str, Any] = {"output_layouts": Replicate()}
_SPLIT: dict[str, Any] = {"input_layouts": Replicate()}
TORCH_STYLES: dict[str, tuple[type[ParallelStyle], dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "interleaved_colwise": (ColwiseParallel, {}),
    "colwise_gather_output": (ColwiseParallel, _GATHERED),
    "colwise_rep": (ColwiseParallel, _GATHERED),
    "embedding_colwise": (ColwiseParallel, _GATHERED),
    "rowwise": (RowwiseParallel, {}),
    "rowwise_split_input": (RowwiseParallel, _SPLIT),
    "rowwise_rep": (RowwiseParallel, _SPLIT),
    "embedding_rowwise": (RowwiseParallel, _SPLIT),
    "sequence_parallel": (SequenceParallel, {}),
}
_EXPERTS = ("moe_tp_experts", "moe_identity_expert")
_WHOLE, _FEATURES = (Replicate(),), (Shard(-1),)


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Translates a style name of a plan for ``torch``'s own ``parallelize_module``.

    Raises:
        ValueError: if torch has no such style, or the name is not known.
    """
    if style in TORCH_STYLES:
        kind, arguments = TORCH_STYLES[style]
        return kind(**arguments)
    if style in STYLES:
        raise ValueError(
            f"torch has no ParallelStyle that does what {style!r} does; fsdp2_strategy_parallelize has a style of its "
            "own for it, so give it the name"
        )
    raise ValueError(f"{style!r} is not a style of a tensor-parallel plan; use one of {', '.join(TORCH_STYLES)}")


class ReplicatedWithGradAllReduce(ParallelStyle):
    """Keeps a module whole that works on a rank's slice (norms of a rank's heads): its gradients are summed over tp.

    Its parameters become DTensors that are whole on every rank, beside those of torch's styles.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        swap = ParameterSwap()
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
                owner.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
                swap.add(owner, name, _local_of_partial)
        swap.install(module)
        return module


def _local_of_partial(stored: DTensor) -> Tensor:
    """Show the local tensor of a whole parameter, whose gradient is a rank's term of the sum over tp.

    The gradient is a product, which is nobody else's (see ``own`` of ``_compat/dtensor/gradients.py``) in compiled
    models, too: compilers take copies out of their graphs.
    """
    return scale_gradient(stored.to_local(grad_placements=[Partial()]), 1.0)


TORCH_STYLES["replicated_with_grad_allreduce"] = (ReplicatedWithGradAllReduce, {})


def translate_parallel_style(style: str) -> ParallelStyle:
    """Translates a style name; the older name of :func:`translate_to_torch_parallel_style`."""
    return translate_to_torch_parallel_style(style)


def get_hf_tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Translates the plan of a model; the older name of :func:`get_hf_tp_shard_plan`."""
    return get_hf_tp_shard_plan(model)


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Translates the plan that a model publishes for ``torch``'s own ``parallelize_module``.

    Merged from the plans of the models inside of it, whose rules get their prefix, of its class and of the instance.
    Embeddings without a rule are split by rows, and the logits that a gathering head would give are a DTensor, split on
    the vocabulary. Experts of a mixture stay whole, and every rank computes all of them. ``parallelize_module`` unties
    weights: call ``model.tie_weights()`` after it.

    Returns:
        patterns of module names to styles.

    Raises:
        ValueError: if the model has no plan, or the plan has styles that torch lacks (all of them are named).
    """
    plan = _of_modules(model, published_plan(model))
    if not plan:
        raise ValueError(_without_plan(model))
    lacking = {rule: style for rule, style in plan.items() if style not in TORCH_STYLES}
    if lacking:
        raise ValueError(
            f"the plan of {type(model).__name__} has styles that torch lacks: {lacking}; fsdp2_strategy_parallelize "
            "applies it with styles of its own"
        )
    styles = {rule: translate_to_torch_parallel_style(style) for rule, style in plan.items()}
    embedding, head = find_names_of_ends(model)
    if embedding is not None:
        styles.setdefault(embedding, RowwiseParallel(**_SPLIT))
    if head is not None and plan.get(head) in ("colwise_rep", "colwise_gather_output"):
        styles[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return styles


def _of_modules(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Leave out the rules of experts: they name parameters, and torch's styles are for modules."""
    experts = {rule for rule, style in plan.items() if style in _EXPERTS}
    return {
        rule: style
        for rule, style in plan.items()
        if not any(rule == expert or rule.startswith(f"{expert}.") for expert in experts)
    }


def _without_plan(model: nn.Module) -> str:
    name = type(model).__name__
    inside = next((n for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)), None)
    if inside is not None and not isinstance(model, PreTrainedModel):
        return f"{name} is no Hugging Face model, but holds one; pass that: get_hf_tp_shard_plan(model.{inside})"
    return (
        f"{name} publishes no tensor-parallel plan (_tp_plan, tp_plan); write one, and give it to "
        "fsdp2_strategy_parallelize(tp_shard_plan=...)"
    )


def name_of_style(style: str | ParallelStyle, rule: str, is_embedding: bool, is_head: bool = False) -> str:
    """Translates a torch style to the style name that does the same; a name stays as it is.

    Args:
        style: from a user's plan.
        rule: the pattern that it stands for.
        is_embedding: whether that pattern names embeddings.
        is_head: whether it names what makes the logits; as a DTensor they are whole, wherever their parts are.

    Raises:
        ValueError: with the rule, if none of our styles has these layouts.
    """
    if isinstance(style, str):
        return style
    name = _name_of_style(style, is_embedding)
    if is_head and name == "colwise" and not getattr(style, "use_local_output", True):
        return "colwise_gather_output"
    if name is None:
        layouts = {key: value for key, value in vars(style).items() if key.endswith("layouts") and value}
        hint = " (sequence_parallel=True cuts the sequence, without a rule)" if _cuts_sequence(style) else ""
        raise ValueError(
            f"the tensor-parallel plan gives {rule!r} the torch style {type(style).__name__} with {layouts}, which has "
            f"no equivalent here{hint}; use ColwiseParallel or RowwiseParallel with default or replicated layouts, or "
            f"one of the names {', '.join(STYLES)}"
        )
    return name


def _name_of_style(style: ParallelStyle, is_embedding: bool) -> str | None:
    if type(style) is ReplicatedWithGradAllReduce:
        return "replicated_with_grad_allreduce"
    if type(style) is ColwiseParallel and _last(style.input_layouts) == _WHOLE:
        if _last(style.output_layouts) == _WHOLE:
            return "embedding_colwise" if is_embedding else "colwise_gather_output"
        return "colwise" if _last(style.output_layouts) == _FEATURES and not is_embedding else None
    if type(style) is RowwiseParallel and _last(style.output_layouts) == _WHOLE:
        if _last(style.input_layouts) == _WHOLE:
            return "embedding_rowwise" if is_embedding else "rowwise_split_input"
        return "rowwise" if _last(style.input_layouts) == _FEATURES and not is_embedding else None
    return "replicate" if type(style) in _PREPARATIONS and _changes_nothing(style) else None


_PREPARATIONS = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)


def _last(layouts: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Write a shard of [batch, seq, features] on features as one of the last dimension, as styles may say either."""
    return tuple(Shard(-1) if layout == Shard(2) else layout for layout in layouts)


def _changes_nothing(style: ParallelStyle) -> bool:
    return all(layout.is_replicate() for layout in _layouts(style))


def _cuts_sequence(style: ParallelStyle) -> bool:
    return isinstance(style, SequenceParallel) or Shard(1) in _layouts(style)


def _layouts(value: Any) -> list[Placement]:
    """Yields all placements that a style mentions."""
    if isinstance(value, Placement):
        return [value]
    if isinstance(value, dict):
        return [layout for item in value.values() for layout in _layouts(item)]
    if isinstance(value, tuple):
        return [layout for item in value for layout in _layouts(item)]
    return _layouts(vars(value)) if isinstance(value, ParallelStyle) else []
