"""The switches of FSDP2 with tensor parallelism."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.config.activation_checkpointing import check_checkpointing
from lightning_automodel.config.switches import StageSwitches
from lightning_automodel.config.values import (
    check_autocast,
    check_compile,
    check_count,
    check_exchange,
    check_loss,
    check_nonfinite,
    check_recipe,
    check_resharding,
    check_switches,
    check_tp_plan,
    resolve_dispatcher,
    resolve_dtype,
    resolve_mp_policy,
    resolve_offload_policy,
)
from lightning_automodel.distributed.logs import warn_once

TOWER_POLICIES = ("root", "per_layer", "replicate")


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(StageSwitches):
    """Switches of :class:`~lightning_automodel.FSDP2TPStrategy`; ``docs/levers.md`` measures what each is worth.

    Attributes:
        sequence_parallel: residual stream sharded on the sequence over tp: activations between layers take 1/tp.
        cp_balance: with cp, each rank has rows from the front and from the back of a sequence, because the later ones
            of a causal model see more keys; ``False``: consecutive rows.
        cp_exchange: what attention does with cp: "gather" the keys and values of all ranks; "all_to_all": each rank has
            the whole sequence of some heads, which cp must divide; "auto": what moves fewer bytes, layer by layer.
        expert_dispatcher: with ep, what brings tokens to experts instead of torch's all-to-all (DeepEP, for example): a
            function or its import path, called as described in ``docs/experts.md``.
        tp_plan: rules that replace the model's own tensor-parallel plan, or with ``"extends": "model"`` among them
            complete and override it: a dict of name pattern to style name or torch ``ParallelStyle``, or the import
            path of one or of a function that returns one.
        patch_is_packed_sequence: every row of a batch is one document, and transformers need not look: no wait for the
            device in every forward pass without an attention mask, and in every layer of flash attention, which has
            static shapes for compile then. Wrong for packed documents; it concerns all models of the process.
        mp_policy: FSDP2's ``MixedPrecisionPolicy``, or its fields as a dict of dtype names from YAML. ``None`` follows
            ``Trainer(precision=...)``. ``output_dtype`` is of what the model returns.
        offload_policy: parameters, reduced gradients and states of the optimizer wait on the host; a unit is on the
            device while it computes. ``True``, FSDP2's ``CPUOffloadPolicy``, or its field ``pin_memory`` as a dict. On
            CUDA ``backend`` is then "cuda:nccl,cpu:gloo": clipping and checkpoints communicate on the host.
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
        enable_async_tensor_parallel: the gathers and reduce-scatters of sequence parallelism run piece by piece, beside
            the matrix products that they feed and that feed them. Turns ``sequence_parallel`` on, with a warning; needs
            ``enable_compile`` with "inductor", and GPUs of a tp group that reach each other's memory.
        enable_compile: compile each block in place, with ``torch.compile``, and what the loss does with logits (on
            CUDA that is compiled in any case); names and checkpoints stay as they are.
        compile_backend: of ``torch.compile``.
        compile_dynamic: ``True``: one graph for all lengths of the sequence. ``False``: one for each. ``None``: for the
            first, and then one for all.
        enable_fsdp2_prefetch: explicit prefetch chains between blocks.
        fsdp2_backward_prefetch_depth: blocks gathered ahead in the backward pass; 2 hides the gather, 1 saves memory.
        fsdp2_forward_prefetch_depth: blocks gathered ahead in the forward pass.
        fsdp2_min_num_params: consecutive blocks are gathered, freed and reduced together until they hold so many
            parameters (of the whole model; a rank has 1/tp of them): for blocks so small that their collectives are all
            latency. ``None``: each block alone.
        tower_policy: how the vision and audio towers of a composite model are sharded over the data ranks. "root": with
            what lies outside of blocks, gathered in every step, so that a batch without images on some ranks cannot
            hang. "per_layer": block by block, the least memory; every rank needs images in every step. "replicate":
            not at all, for frozen towers only: one that trains is an error.
        chunked_loss: tokens per chunk (1024 is a good start): called with labels, a language model computes its loss
            chunk by chunk from the hidden states, never holds all logits, and returns ``logits=None``. ``None``: off.
        broadcast_weights: with ``dp_replicate`` > 1, only the first replica reads the files of ``from_pretrained``, and
            sends its shards to the others: for slow shared disks. ``False``: every replica reads.
        float8: matrix products inside of blocks in float8, by a recipe of torchao: "tensorwise" (the fastest),
            "rowwise", or "rowwise_with_gw_hp" (the most exact). For GPUs from Ada and Hopper on, with bfloat16 around
            and ``enable_compile``; emulated on CPU.
        loss_kernel: what computes that loss: "torch", or on CUDA without tp "liger" or "cut_cross_entropy", where
            installed (``chunked_loss`` is then not needed: they choose their own chunks).
        check_replicas_every_n_steps: after so many steps of an optimizer, parameters that several ranks hold whole
            (over tp, and over replicas) are compared by a checksum, and a difference is an error that names one. The
            strategies do so at each checkpoint in any case; ``None``: only there.
        nonfinite: what happens before a step whose loss or gradients are NaN or infinite on any rank: "error" ends the
            run and names step, micro-batch and parameter, "skip" leaves the step out with a warning, "ignore" looks at
            nothing. float16 (``precision="16-mixed"``) leaves such steps out itself.
        skip_damaged_checkpoints: where the newest checkpoint is damaged, ``ckpt_path="last"`` goes on from the newest
            one beside it that is not, with a warning that names both. ``False``: it is an error, as for every other
            ``ckpt_path``.
    """

    sequence_parallel: bool = False
    cp_balance: bool = True
    cp_exchange: str = "auto"
    expert_dispatcher: Callable[..., Any] | str | None = None
    tp_plan: Mapping[str, str | ParallelStyle] | str | None = None
    patch_is_packed_sequence: bool = False
    mp_policy: MixedPrecisionPolicy | dict[str, Any] | None = None
    offload_policy: CPUOffloadPolicy | dict[str, Any] | bool | None = None
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
    fsdp2_min_num_params: int | None = None
    tower_policy: str = "root"
    chunked_loss: int | None = None
    broadcast_weights: bool = False
    float8: str | None = None
    loss_kernel: str = "torch"
    check_replicas_every_n_steps: int | None = None
    nonfinite: str = "error"
    skip_damaged_checkpoints: bool = True

    def __post_init__(self) -> None:
        check_switches(self)
        check_tp_plan(self.tp_plan)
        check_resharding(self.reshard_after_forward)
        check_checkpointing(self.activation_checkpointing, self.activation_checkpointing_scope, self.activation_offload)
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"FSDP2Config({name}={getattr(self, name)}) must be at least 1; "
                    "enable_fsdp2_prefetch=False turns prefetching off"
                )
        if self.tower_policy not in TOWER_POLICIES:
            raise ValueError(f"tower_policy={self.tower_policy!r} is not one of {', '.join(TOWER_POLICIES)}")
        check_count("fsdp2_min_num_params", self.fsdp2_min_num_params, "parameters", 10_000_000)
        check_exchange(self.cp_exchange)
        resolve_dispatcher(self.expert_dispatcher)
        check_loss(self.chunked_loss, self.loss_kernel)
        check_count("check_replicas_every_n_steps", self.check_replicas_every_n_steps, "steps", 100)
        check_recipe(self.float8)
        check_nonfinite(self.nonfinite)
        check_compile(self.enable_compile, self.compile_backend, self.compile_dynamic)
        resolve_mp_policy(self.mp_policy)
        resolve_offload_policy(self.offload_policy)
        check_autocast(resolve_dtype(self.autocast_dtype))
        if self.enable_async_tensor_parallel:
            self._complete_async()

    def _complete_async(self) -> None:
        needed = {"enable_compile": True, "compile_backend": "inductor"}
        missing = [f"{name}={value!r}" for name, value in needed.items() if getattr(self, name) != value]
        if missing:
            raise ValueError(
                "enable_async_tensor_parallel=True overlaps what sequence parallelism communicates inside of compiled "
                f"blocks; set {' and '.join(missing)} as well"
            )
        if not self.sequence_parallel:
            warn_once(
                "enable_async_tensor_parallel=True turns sequence_parallel on: it overlaps what that communicates"
            )
            object.__setattr__(self, "sequence_parallel", True)
