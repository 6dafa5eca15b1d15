"""The switches of the strategies, as frozen dataclasses that YAML and the command line reach. Sizes are not here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.activation import check_checkpointing
from lightning_automodel.autocasting import check_autocast
from lightning_automodel.kernels import LOSS_KERNELS

_COMING = {
    "offload_policy": None,
    "enable_async_tensor_parallel": False,
}
LEVERS_OF_BLOCKS = (
    "activation_checkpointing",
    "activation_checkpointing_scope",
    "activation_offload",
    "enable_compile",
)
"""Fields that work on the repeated blocks of a model."""
TOWER_POLICIES = ("root", "per_layer", "replicate")


@dataclass(frozen=True, kw_only=True)
class FSDP2Config:
    """Switches of :class:`~lightning_automodel.FSDP2TPStrategy` (``docs``: what each is worth).

    Attributes:
        sequence_parallel: residual stream sharded on the sequence over tp: activations between layers take 1/tp.
        tp_plan: rules that complete or override the model's own tensor-parallel plan: a dict of name pattern to style
            name or torch ``ParallelStyle``, or the import path of one or of a function that returns one.
        patch_is_packed_sequence: flash attention takes every row of a batch for one document, without looking: static
            shapes for compile, and no wait for the device in every layer. Wrong for packed documents; it concerns all
            models of the process.
        mp_policy: FSDP2's ``MixedPrecisionPolicy``, or its fields as a dict of dtype names from YAML. ``None`` follows
            ``Trainer(precision=...)``. ``output_dtype`` is of what the model returns.
        offload_policy: FSDP2's ``CPUOffloadPolicy``. Not available yet.
        autocast_dtype: dtype of a ``torch.autocast`` around the forward pass, "bfloat16" or "float16". With
            ``mp_policy.output_dtype`` float32 the residual stream is kept in float32.
        activation_checkpointing: compute activations again in the backward pass. ``True`` or "full": blocks keep their
            input only. "submodule": each child of a block (attention, feed-forward, norms) keeps its input.
            "selective": blocks keep the results of attention and of every second matrix product too. A list names what
            they keep: "attention", "matmul", or torch's operations, such as "aten.mm".
        activation_checkpointing_scope: of which parts of a composite model: "all", "language", "vision", "audio",
            "multimodal" (all that is not language), or several of these.
        activation_offload: what checkpointed blocks keep waits in host memory (on CUDA).
        defer_fsdp_grad_sync: gradients are reduced over the data ranks on the last micro-batch of a step only;
            ``False`` reduces at every micro-batch, which keeps sharded gradients only.
        reshard_after_forward: ``None``: all blocks but the last; ``True``, ``False`` or an int override, as in FSDP2.
        backend: of the process group; ``None``: "nccl" on CUDA, "gloo" on CPU.
        enable_async_tensor_parallel: overlap of communication and matmul. Not available yet.
        enable_compile: compile each block in place, with ``torch.compile``; names and checkpoints stay as they are.
        compile_backend: of ``torch.compile``.
        compile_dynamic: ``True``: one graph for all lengths of the sequence. ``False``: one for each. ``None``: for the
            first, and then one for all.
        enable_fsdp2_prefetch: explicit prefetch chains between blocks.
        fsdp2_backward_prefetch_depth: blocks gathered ahead in the backward pass; 2 hides the gather, 1 saves memory.
        fsdp2_forward_prefetch_depth: blocks gathered ahead in the forward pass.
        tower_policy: how the vision and audio towers of a composite model are sharded over the data ranks. "root": with
            what lies outside of blocks, gathered in every step, so that a batch without images on some ranks cannot
            hang. "per_layer": block by block, the least memory; every rank needs images in every step. "replicate":
            not at all, for frozen towers only.
        chunked_loss: tokens per chunk (1024 is a good start): called with labels, a language model computes its loss
            chunk by chunk from the hidden states, never holds all logits, and returns ``logits=None``. ``None``: off.
        broadcast_weights: with ``dp_replicate`` > 1, only the first replica reads the files of ``from_pretrained``, and
            sends its shards to the others: for slow shared disks. ``False``: every replica reads.
        loss_kernel: what computes that loss: "torch", or on CUDA without tp "liger" or "cut_cross_entropy", where
            installed (``chunked_loss`` is then not needed: they choose their own chunks).
    """

    sequence_parallel: bool = False
    tp_plan: Mapping[str, str | ParallelStyle] | str | None = None
    patch_is_packed_sequence: bool = False
    mp_policy: MixedPrecisionPolicy | dict[str, Any] | None = None
    offload_policy: CPUOffloadPolicy | None = None
    autocast_dtype: torch.dtype | str | None = None
    activation_checkpointing: bool | str | list[str] = False
    activation_checkpointing_scope: str | list[str] = "all"
    activation_offload: bool = False
    defer_fsdp_grad_sync: bool = True
    reshard_after_forward: bool | int | None = None
    backend: str | None = None
    enable_async_tensor_parallel: bool = False
    enable_compile: bool = False
    compile_backend: str = "inductor"
    compile_dynamic: bool | None = None
    enable_fsdp2_prefetch: bool = True
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    tower_policy: str = "root"
    chunked_loss: int | None = None
    broadcast_weights: bool = False
    loss_kernel: str = "torch"

    def __post_init__(self) -> None:
        _refuse_coming(self)
        check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope, self.activation_offload)
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"FSDP2Config({name}={getattr(self, name)}) must be at least 1; "
                    "enable_fsdp2_prefetch=False turns prefetching off"
                )
        if self.tower_policy not in TOWER_POLICIES:
            raise ValueError(f"tower_policy={self.tower_policy!r} is not one of {', '.join(TOWER_POLICIES)}")
        _check_loss(self.chunked_loss, self.loss_kernel)
        _check_compile(self)
        resolve_mp_policy(self.mp_policy)
        check_autocast(resolve_dtype(self.autocast_dtype))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; values are not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def without_blocks(self) -> "FSDP2Config":
        """The same for a layer: what works on repeated blocks is left at its default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        names = (*LEVERS_OF_BLOCKS, "compile_backend", "compile_dynamic")
        return dataclasses.replace(self, **{name: defaults[name] for name in names})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Switches of :class:`~lightning_automodel.DDPStrategy`.

    Attributes:
        activation_checkpointing: as in :class:`FSDP2Config`, and so the next two.
        activation_checkpointing_scope: of which parts of a composite model.
        activation_offload: what checkpointed blocks keep waits in host memory (on CUDA).
        broadcast_buffers: the buffers of rank 0 (running means) replace those of the others before each forward pass.
            They are equal when training starts in any case.
        find_unused_parameters: parameters that a step does not use are looked for, in every step. Without it, such a
            step is an error.
        static_graph: every step uses the same parameters in the same way, which DDP then learns from the first one.
            Gradients are then reduced at every micro-batch.
        bucket_cap_mb: gradients are reduced in parts of this size, in MiB; ``None``: torch's default.
        gradient_as_bucket_view: gradients lie in the memory that is reduced, and are not copied there.
        autocast_dtype: dtype of a ``torch.autocast`` around the forward pass, "bfloat16" or "float16".
        enable_compile: as in :class:`FSDP2Config`, and so the next three.
        compile_backend: of ``torch.compile``.
        compile_dynamic: one graph for all lengths, or one for each.
        patch_is_packed_sequence: flash attention takes every row of a batch for one document.
        read_weights_on_all_ranks: every process reads the files of ``from_pretrained``; by default one process per node
            does, and the others get the weights from it.
        chunked_loss: as in :class:`FSDP2Config`.
        loss_kernel: as in :class:`FSDP2Config`.
        backend: of the process group; ``None``: "nccl" on CUDA, "gloo" on CPU.
    """

    activation_checkpointing: bool | str | list[str] = False
    activation_checkpointing_scope: str | list[str] = "all"
    activation_offload: bool = False
    broadcast_buffers: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    autocast_dtype: torch.dtype | str | None = None
    enable_compile: bool = False
    compile_backend: str = "inductor"
    compile_dynamic: bool | None = None
    patch_is_packed_sequence: bool = False
    read_weights_on_all_ranks: bool = False
    chunked_loss: int | None = None
    loss_kernel: str = "torch"
    backend: str | None = None

    def __post_init__(self) -> None:
        _refuse_coming(self)
        check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope, self.activation_offload)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} must be positive; None is torch's default")
        _check_loss(self.chunked_loss, self.loss_kernel)
        _check_compile(self)
        check_autocast(resolve_dtype(self.autocast_dtype))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; values are not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig:
    """Switches of :class:`~lightning_automodel.MegatronFSDPStrategy`, checked against megatron-fsdp 0.6.

    Attributes:
        megatron_fsdp_unit_modules: import paths of the classes that are gathered and freed as one; ``None``: those of
            the model's blocks.
        zero_dp_strategy: 0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: parameters too.
        init_fsdp_with_meta_device: shard a model before its weights exist. Refused: weights are loaded before sharding.
        grad_reduce_in_fp32: gradients narrower than float32 are reduced in float32.
        preserve_fp32_weights: the optimizer updates float32 copies of narrower parameters. Implied by
            ``Trainer(precision="bf16-mixed")``.
        overlap_grad_reduce: reduce while the backward pass computes. ``False`` is refused: the library then reduces
            wrongly, or overlaps all the same.
        overlap_param_gather: gather while computing. ``False`` is refused for the same reason.
        check_for_nan_in_grad: a step whose gradients are not finite is an error; waits for the device in each step.
        report_nan_in_param_grad: checks each gradient as it comes; slow.
        average_in_collective: refused: the library then gives wrong means.
        disable_bucketing: each unit's parameters of one dtype are communicated at once.
        calculate_per_token_loss: gradients are summed over the data ranks and not averaged: for losses that are divided
            by the tokens of all ranks already.
        keep_fp8_transpose_cache: needs transformer_engine.
        nccl_ub: buffers registered with NCCL; needs the backend "nccl".
        fsdp_double_buffer: two buffers that stay allocated take turns in gathering units; stage 3, blocks of one size.
        activation_checkpointing: as in :class:`FSDP2Config`.
        enable_compile: as in :class:`FSDP2Config`, and so the next two.
        compile_backend: of ``torch.compile``.
        compile_dynamic: one graph for all lengths, or one for each.
        sequence_parallel: refused; FSDP2TPStrategy has it.
        tp_plan: as in :class:`FSDP2Config`.
        chunked_loss: as in :class:`FSDP2Config`.
        loss_kernel: as in :class:`FSDP2Config`.
        backend: of the process group; ``None``: "nccl".
    """

    megatron_fsdp_unit_modules: list[str] | None = None
    zero_dp_strategy: int = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: bool | str | list[str] = False
    enable_compile: bool = False
    compile_backend: str = "inductor"
    compile_dynamic: bool | None = None
    sequence_parallel: bool = False
    tp_plan: Mapping[str, str | ParallelStyle] | str | None = None
    chunked_loss: int | None = None
    loss_kernel: str = "torch"
    backend: str | None = None

    def __post_init__(self) -> None:
        check_checkpointing(self.activation_checkpointing, "all", False)
        _check_loss(self.chunked_loss, self.loss_kernel)
        _check_compile(self)
        if self.zero_dp_strategy not in range(4):
            raise ValueError(f"zero_dp_strategy={self.zero_dp_strategy!r} is not a ZeRO stage; use 0, 1, 2 or 3")
        for name, (needed, reason) in self._refusals().items():
            if getattr(self, name) != needed:
                raise ValueError(f"MegatronFSDPConfig({name}={getattr(self, name)!r}): {reason}; leave it at {needed}")

    def _refusals(self) -> dict[str, tuple[bool, str]]:
        """Fields that must have one value, and why."""
        wrong = "megatron-fsdp 0.6 gives wrong gradients or overlaps all the same"
        found: dict[str, tuple[bool, str]] = {
            "overlap_grad_reduce": (True, wrong),
            "overlap_param_gather": (True, wrong),
            "average_in_collective": (False, "megatron-fsdp 0.6 gives wrong means"),
            "sequence_parallel": (False, "use FSDP2TPStrategy(config=FSDP2Config(sequence_parallel=True))"),
            "init_fsdp_with_meta_device": (False, "from_pretrained and meta models are loaded before they are sharded"),
        }
        if self.keep_fp8_transpose_cache and find_spec("transformer_engine") is None:
            found["keep_fp8_transpose_cache"] = (False, "it needs transformer_engine, which is not installed")
        if self.nccl_ub and "gloo" in (self.backend or ""):
            found["nccl_ub"] = (False, f"it registers buffers with NCCL, but backend={self.backend!r}")
        if self.fsdp_double_buffer and self.zero_dp_strategy != 3:
            found["fsdp_double_buffer"] = (False, "only zero_dp_strategy=3 gathers units")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; values are not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _refuse_coming(config: Any) -> None:
    for name, default in _COMING.items():
        if getattr(config, name, default) != default:
            raise ValueError(
                f"{type(config).__name__}({name}={getattr(config, name)!r}) is not available in this version; "
                f"leave {name} at {default!r}"
            )


def _check_compile(config: FSDP2Config | DDPConfig | MegatronFSDPConfig) -> None:
    if not config.enable_compile and (config.compile_backend, config.compile_dynamic) != ("inductor", None):
        raise ValueError("compile_backend and compile_dynamic do nothing without enable_compile=True")


def _check_loss(chunked_loss: int | None, loss_kernel: str) -> None:
    if chunked_loss is not None and chunked_loss < 1:
        raise ValueError(f"chunked_loss={chunked_loss} must be at least 1 token; None turns it off")
    if loss_kernel not in LOSS_KERNELS:
        raise ValueError(f"loss_kernel={loss_kernel!r} is not one of {', '.join(LOSS_KERNELS)}")


def resolve_mp_policy(policy: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """Turns the fields of a policy, with dtypes as names such as ``"bfloat16"``, into FSDP2's object.

    Raises:
        ValueError: for a field or a dtype that does not exist.
    """
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy
    known = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    if unknown := set(policy) - known:
        raise ValueError(
            f"mp_policy has no field {', '.join(sorted(unknown))}; its fields are {', '.join(sorted(known))}"
        )
    fields: dict[str, Any] = {k: resolve_dtype(v) if k.endswith("dtype") else v for k, v in policy.items()}
    return MixedPrecisionPolicy(**fields)


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """``"bfloat16"`` or ``"torch.bfloat16"`` to the dtype of that name.

    Raises:
        ValueError: if torch has no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype of torch; write for example 'bfloat16' or 'float32'")
    return found
