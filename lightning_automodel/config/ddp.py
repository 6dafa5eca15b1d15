"""The switches of replicas."""

from dataclasses import dataclass

import torch

from lightning_automodel.config.activation_checkpointing import check_checkpointing
from lightning_automodel.config.switches import StageSwitches
from lightning_automodel.config.values import (
    check_autocast,
    check_compile,
    check_count,
    check_loss,
    check_nonfinite,
    check_switches,
    resolve_dtype,
)


@dataclass(frozen=True, kw_only=True)
class DDPConfig(StageSwitches):
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
        patch_is_packed_sequence: every row of a batch is one document, and transformers need not look.
        read_weights_on_all_ranks: every process reads the files of ``from_pretrained``; by default one process per node
            does, and the others get the weights from it.
        chunked_loss: as in :class:`FSDP2Config`.
        loss_kernel: as in :class:`FSDP2Config`.
        check_replicas_every_n_steps: as in :class:`FSDP2Config`.
        nonfinite: as in :class:`FSDP2Config`.
        skip_damaged_checkpoints: as in :class:`FSDP2Config`.
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
    check_replicas_every_n_steps: int | None = None
    nonfinite: str = "error"
    skip_damaged_checkpoints: bool = True
    backend: str | None = None

    def __post_init__(self) -> None:
        check_switches(self)
        check_nonfinite(self.nonfinite)
        check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope, self.activation_offload)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb} must be positive; None is torch's default")
        check_loss(self.chunked_loss, self.loss_kernel)
        check_count("check_replicas_every_n_steps", self.check_replicas_every_n_steps, "steps", 100)
        check_compile(self.enable_compile, self.compile_backend, self.compile_dynamic)
        check_autocast(resolve_dtype(self.autocast_dtype))
