"""The switches of Megatron-FSDP."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.config.activation_checkpointing import check_checkpointing
from lightning_automodel.config.switches import StageSwitches
from lightning_automodel.config.values import check_compile, check_count, check_loss, check_switches, check_tp_plan


@dataclass(frozen=True, kw_only=True)
class MegatronFSDPConfig(StageSwitches):
    """Switches of :class:`~lightning_automodel.MegatronFSDPStrategy`, checked against megatron-fsdp 0.6.

    Attributes:
        megatron_fsdp_unit_modules: import paths of the classes that are gathered and freed as one; ``None``: those of
            the model's blocks outside of vision and audio towers, which a batch may pass over.
        zero_dp_strategy: 0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: parameters too.
        init_fsdp_with_meta_device: shard a model before its weights exist. Refused: weights are loaded before sharding.
        grad_reduce_in_fp32: gradients narrower than float32 are reduced in float32, and summed over micro-batches where
            the optimizer has float32. Implied by ``Trainer(precision=...)``; a setting of loops of one's own.
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
        check_replicas_every_n_steps: as in :class:`FSDP2Config`.
        skip_damaged_checkpoints: as in :class:`FSDP2Config`.
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
    check_replicas_every_n_steps: int | None = None
    skip_damaged_checkpoints: bool = True
    backend: str | None = None

    def __post_init__(self) -> None:
        check_switches(self)
        check_tp_plan(self.tp_plan)
        check_checkpointing(self.activation_checkpointing, "all", False)
        check_loss(self.chunked_loss, self.loss_kernel)
        check_count("check_replicas_every_n_steps", self.check_replicas_every_n_steps, "steps", 100)
        check_compile(self.enable_compile, self.compile_backend, self.compile_dynamic)
        if self.zero_dp_strategy not in range(4):
            raise ValueError(f"zero_dp_strategy={self.zero_dp_strategy!r} is not a ZeRO stage; use 0, 1, 2 or 3")
        for name, (needed, reason) in self._refusals().items():
            if getattr(self, name) != needed:
                raise ValueError(f"MegatronFSDPConfig({name}={getattr(self, name)!r}): {reason}; leave it at {needed}")

    def _refusals(self) -> dict[str, tuple[bool, str]]:
        """List the fields that must have one value, and why."""
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
