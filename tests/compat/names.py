"""The private names of other libraries that the package uses, by their owner."""

import ast
from pathlib import Path

from torch.distributed import distributed_c10d

import lightning_automodel

COMPAT = sorted((Path(lightning_automodel.__file__).parent / "_compat").glob("*.py"))

PL, TRAINER = "lightning.pytorch", "lightning.pytorch.trainer"
SET_TIMEOUT = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
FSDP = "torch.distributed.fsdp._fully_shard"
ATTRIBUTES = {
    "torch:ops.aten": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "torch:": ("_assert_async", "_dynamo", "_inductor"),
    "torch:Tensor": ("_base", "_version"),
    "torch._inductor.config:": ("_micro_pipeline_tp",),
    "torch._dynamo.eval_frame:OptimizedModule": ("_orig_mod",),
    "torch.autograd:Variable": ("_execution_engine",),
    "torch.distributed:ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed:ProcessGroupGloo._Options": ("_timeout",),
    "torch.distributed.distributed_c10d:": ("_set_pg_timeout",),
    "torch.distributed.device_mesh:DeviceMesh": ("_flatten", "_get_root_mesh", "_pg_registry"),
    "torch.nn:Module": ("_apply", "_forward_hooks"),
    f"{FSDP}._fsdp_param:FSDPParam": ("_get_grad_inner_tensor", "_unsharded_param"),
    f"{FSDP}._fsdp_param_group:FSDPParamGroup": ("_partial_reduce_output",),
    f"{FSDP}._fsdp_state:FSDPState": ("_auto_reshard_after_forward", "_fsdp_param_groups"),
    f"{PL}:LightningModule": ("_compiler_ctx", "_device"),
    f"{PL}.callbacks:ModelCheckpoint": (
        "_ModelCheckpoint__resolve_ckpt_dir",
        "_monitor_candidates",
        "_save_last_checkpoint",
    ),
    f"{PL}.callbacks:ThroughputMonitor": ("_throughputs",),
    f"{PL}.loops.evaluation_loop:_EvaluationLoop": ("_data_fetcher", "_results", "_store_dataloader_outputs"),
    f"{PL}.loops.fit_loop:_FitLoop": ("_combined_loader", "_data_fetcher", "_load_combined_loader_states"),
    f"{PL}.loops.training_epoch_loop:_TrainingEpochLoop": (
        "_batches_that_stepped",
        "_should_accumulate",
        "_should_check_val_fx",
    ),
    f"{PL}.utilities.combined_loader:CombinedLoader": ("_mode",),
    f"{TRAINER}:Trainer": (
        "_accelerator_connector",
        "_checkpoint_connector",
        "_data_connector",
        "_logger_connector",
        "_signal_connector",
    ),
    f"{TRAINER}.connectors.accelerator_connector:_AcceleratorConnector": (
        "_check_and_init_precision",
        "_precision_flag",
        "_precision_plugin_flag",
    ),
    f"{TRAINER}.connectors.checkpoint_connector:_CheckpointConnector": ("_select_ckpt_path",),
    f"{TRAINER}.connectors.data_connector:_DataConnector": ("_requires_distributed_sampler", "_resolve_sampler"),
    f"{TRAINER}.connectors.logger_connector.logger_connector:_LoggerConnector": ("_current_fx",),
    f"{TRAINER}.connectors.signal_connector:_SignalConnector": ("_slurm_sigusr_handler_fn", "_sigterm_notifier_fn"),
    "megatron_fsdp.megatron_fsdp:MegatronFSDP": (
        "_replace_param_with_raw_if_needed",
        "_root_pre_backward_hook_handle",
    ),
    "peft.tuners.tuners_utils:": ("_torch_supports_distributed",),
    "transformers:PreTrainedModel": (
        "_finalize_model_loading",
        "_initialize_missing_keys",
        "_load_pretrained_model",
        "_tp_plan",
    ),
    "transformers.modeling_flash_attention_utils:": ("_is_packed_sequence",),
    "transformers.modeling_layers:GradientCheckpointingLayer": ("_can_checkpoint_with_cache",),
}
"""By owner (module:class): methods, or attributes that its code sets or reads."""

OWN = {"_connector", "_loop", "_requeue"}
"""Attributes of classes in _compat."""

PARAMETERS = {
    f"torch.distributed.distributed_c10d:{SET_TIMEOUT}": ["timeout", "group"],
    f"{FSDP}._fsdp_init:_move_states_to_device": ["params", "buffers", "device"],
    f"{TRAINER}.connectors.accelerator_connector:_AcceleratorConnector._check_and_init_precision": ["self"],
    f"{TRAINER}.connectors.checkpoint_connector:_CheckpointConnector._select_ckpt_path": [
        "self",
        "state_fn",
        "ckpt_path",
        "model_provided",
        "model_connected",
    ],
    "transformers.modeling_flash_attention_utils:_is_packed_sequence": ["position_ids", "batch_size"],
}
"""Of functions that are called by position, or that others take the place of."""


def private_attributes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    attributes = (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {name for name in attributes if name.startswith("_") and not name.startswith("__")}


def unlisted() -> set[str]:
    """What ``_compat`` uses and no test covers."""
    listed = OWN | {name for names in ATTRIBUTES.values() for name in names}
    return set().union(*map(private_attributes, COMPAT)) - listed
