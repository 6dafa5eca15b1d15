"""The private names of other libraries that the package uses, by their owner."""

import ast
from pathlib import Path

from torch.distributed import distributed_c10d

import lightning_automodel

PACKAGE = Path(lightning_automodel.__file__).parent
COMPAT = sorted((PACKAGE / "_compat").rglob("*.py"))

PL, TRAINER = "lightning.pytorch", "lightning.pytorch.trainer"
SET_TIMEOUT = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
FSDP = "torch.distributed.fsdp._fully_shard"
ATTRIBUTES = {
    "torch:ops.aten": (
        "_is_any_true",
        "_grouped_mm",
        "_local_scalar_dense",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_to_copy",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "torch:_C": (
        "DisableTorchFunction",
        "_DisableFuncTorch",
        "_are_functorch_transforms_active",
        "_current_graph_task_id",
        "_nn",
        "_will_engine_execute_node",
    ),
    "torch:_C._nn": ("_parse_to",),
    "torch:UntypedStorage": ("_cdata",),
    "torch._subclasses.fake_tensor:": ("_DISPATCH_META_HANDLERS", "in_kernel_invocation_manager"),
    "torch._subclasses.fake_tensor:FakeTensorMode": ("_get_output_tensor_from_cache_entry", "_prep_args_for_hash"),
    "torch.utils._python_dispatch:TorchDispatchMode": ("_should_skip_dynamo",),
    "torch.utils.checkpoint:": ("_CheckpointFrame",),
    "torch.cuda.memory:": ("_dump_snapshot", "_record_memory_history"),
    "torch.autograd:": ("_profiler_enabled", "_unsafe_preserve_version_counter"),
    "torch:": ("_C", "_assert_async", "_dynamo", "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_inductor"),
    "torch:Tensor": ("_backward_hooks", "_base", "_make_wrapper_subclass", "_post_accumulate_grad_hooks", "_version"),
    "torch:ops.aten.mm.default": ("_overloadpacket", "_schema"),
    "torch.amp:GradScaler": ("_unscale_grads_",),
    "torch.distributed.tensor:DTensor": ("_local_tensor", "_op_dispatcher", "_spec"),
    "torch.distributed.tensor:DTensor._op_dispatcher": ("_custom_op_handlers",),
    "torch.distributed.tensor.debug:": ("_clear_sharding_prop_cache",),
    "torch.distributed.tensor._sharding_prop:ShardingPropagator": ("_propagate_tensor_meta_non_cached",),
    "torch.optim:": ("_muon",),
    "torch.optim._muon:": ("_zeropower_via_newtonschulz",),
    "torch.optim:AdamW": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_step_supports_amp_scaling"),
    "torch._inductor.config:": ("_micro_pipeline_tp",),
    "torch._dynamo.eval_frame:OptimizedModule": ("_orig_mod",),
    "torch._dynamo.utils:": ("dict_keys_getitem",),
    "torch.autograd:Variable": ("_execution_engine",),
    "torch.distributed:ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed:ProcessGroupGloo": ("_Options",),
    "torch.distributed:ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
    "torch.distributed.distributed_c10d:": ("_resolve_process_group", "_set_pg_timeout"),
    "torch.distributed.device_mesh:DeviceMesh": (
        "_concatenate",
        "_flatten",
        "_flatten_mapping",
        "_get_root_mesh",
        "_pg_registry",
        "_unflatten",
    ),
    "torch.nn.parallel:DistributedDataParallel": ("_check_reducer_finalized",),
    "torch.nn.modules.module:": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
    ),
    "torch.nn:Module": (
        "_apply",
        "_backward_hooks",
        "_buffers",
        "_forward_hooks",
        "_backward_pre_hooks",
        "_forward_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ),
    f"{FSDP}._fsdp_param:FSDPParam": (
        "_contiguous_orig_stride",
        "_get_grad_inner_tensor",
        "_module_info",
        "_orig_size",
        "_setattr_on_modules",
        "_sharded_local_tensor",
        "_sharded_param_data",
        "_sharding_spec",
        "_unsharded_param",
    ),
    f"{FSDP}._fsdp_param_group:FSDPParamGroup": (
        "_all_gather_process_group",
        "_all_gather_result",
        "_all_reduce_hook",
        "_partial_reduce_output",
        "_reduce_scatter_comm",
        "_reset_sharded_params",
        "_to_unsharded",
        "_training_state",
        "_with_fqn",
    ),
    f"{FSDP}._fsdp_state:FSDPState": (
        "_auto_reshard_after_forward",
        "_comm_ctx",
        "_is_root",
        "_lazy_init",
        "_modules_to_run_forward",
        "_register_pre_backward_hook",
        "_root_post_backward_final_callback",
        "_state_ctx",
    ),
    "torchmetrics:Metric": ("_cache", "_defaults", "_is_synced", "_persistent", "_reductions", "_sync_dist"),
    f"{PL}:LightningModule": ("_compiler_ctx", "_trainer", "_device", "_device_mesh"),
    f"{PL}.cli:LightningCLI": ("_get", "_subcommand_parsers"),
    f"{PL}.callbacks:ModelCheckpoint": (
        "_every_n_train_steps",
        "_last_global_step_saved",
        "_ModelCheckpoint__resolve_ckpt_dir",
        "_monitor_candidates",
        "_save_last_checkpoint",
    ),
    f"{PL}.callbacks:ThroughputMonitor": ("_throughputs",),
    f"{PL}.callbacks:StochasticWeightAveraging": ("_load_average_model_state",),
    f"{PL}.callbacks:WeightAveraging": (
        "_average_model",
        "_copy_average_to_current",
        "_device",
        "_kwargs",
        "_swap_models",
        "_use_buffers",
    ),
    f"{PL}.loops.evaluation_loop:_EvaluationLoop": (
        "_data_fetcher",
        "_last_val_dl_reload_epoch",
        "_results",
        "_store_dataloader_outputs",
    ),
    f"{PL}.loops.fit_loop:_FitLoop": (
        "_combined_loader",
        "_data_fetcher",
        "_last_train_dl_reload_epoch",
        "_load_combined_loader_states",
        "_combined_loader_states_to_load",
        "_restarting",
        "_should_reload_train_dl",
        "_skip_backward",
    ),
    f"{PL}.loops.training_epoch_loop:_TrainingEpochLoop": (
        "_batches_that_stepped",
        "_should_accumulate",
        "_should_check_val_fx",
    ),
    f"{PL}.strategies:DDPStrategy": (
        "_configure_launcher",
        "_ddp_comm_hook",
        "_ddp_comm_state",
        "_ddp_comm_wrapper",
        "_enable_model_averaging",
        "_get_process_group_backend",
        "_layer_sync",
        "_pl_static_graph_delay_done",
        "_process_group_backend",
        "_timeout",
    ),
    f"{PL}.strategies:ModelParallelStrategy": (
        "_configure_launcher",
        "_device_mesh",
        "_get_process_group_backend",
        "_lightning_module",
        "_process_group_backend",
        "_setup_distributed",
        "_timeout",
    ),
    f"{PL}.plugins.precision:Precision": ("_after_closure",),
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
    f"{TRAINER}.connectors.data_connector:_DataConnector": (
        "_prepare_dataloader",
        "_requires_distributed_sampler",
        "_resolve_sampler",
    ),
    f"{PL}.overrides.distributed:": ("_IndexBatchSamplerWrapper",),
    f"{TRAINER}.connectors.logger_connector.logger_connector:_LoggerConnector": (
        "_callback_metrics",
        "_current_fx",
    ),
    f"{TRAINER}.connectors.signal_connector:_SignalConnector": ("_slurm_sigusr_handler_fn", "_sigterm_notifier_fn"),
    "megatron_fsdp.param_and_grad_buffer:": ("_get_dp_buffer_shard_bucket_index",),
    "megatron_fsdp.param_and_grad_buffer:TensorItemIndex": ("_replace",),
    "megatron_fsdp.param_and_grad_buffer:GradReducePipeline": ("_bucket_group_gradient_reduce",),
    "megatron_fsdp.megatron_fsdp:MegatronFSDP": (
        "_replace_param_with_distributed_if_needed",
        "_replace_param_with_raw_if_needed",
        "_is_shared",
        "_reestablish_shared_weights",
        "_root_pre_backward_hook_handle",
        "_root_pre_backward_hook_issued",
    ),
    "peft.tuners.tuners_utils:": ("_torch_supports_distributed",),
    "transformers:PreTrainedModel": (
        "_can_record_outputs",
        "_finalize_model_loading",
        "_initialize_missing_keys",
        "_load_pretrained_model",
        "_gradient_checkpointing_func",
        "_hf_peft_config_loaded",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_save",
        "_tp_plan",
    ),
    "transformers:PreTrainedModel.loss_function.fget": ("_loss_function",),
    "transformers:PreTrainedConfig": ("_attn_implementation", "_experts_implementation", "_name_or_path"),
    "transformers.core_model_loading:convert_and_load_state_dict_in_model": ("_weight_conversions",),
    "transformers.integrations.moe:": ("_grouped_linear",),
    "transformers.initialization:normal_": ("_is_hf_initialized",),
    "transformers.modeling_flash_attention_utils:": ("_is_packed_sequence",),
    "transformers.modeling_layers:GradientCheckpointingLayer": ("_can_checkpoint_with_cache",),
    "transformers.distributed.fsdp:is_fsdp_managed_module": ("_is_fsdp_managed_module",),
}
"""By owner (module:class): methods, or attributes that its code sets or reads."""

INHERITED = {
    # of Lightning's strategies, precision and callbacks, which ours are
    *("_after_closure", "_average_model", "_device", "_kwargs", "_use_buffers"),
    *("_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_enable_model_averaging", "_layer_sync"),
    *("_process_group_backend", "_setup_distributed", "_timeout"),
    # of Lightning's command line, which ours is
    *("_get", "_subcommand_parsers"),
    *("_exit", "_fields"),  # of os and of named tuples: documented, and private in spelling only
}
"""Attributes that code outside of ``_compat`` asks of itself, and others give."""

OWN = {
    *(
        "_backward",
        "_can_be_used",
        "_compute_with",
        "_connector",
        "_gather",
        "_has_all_gradients",
        "_holds",
        "_is_in_place",
        "_loop",
    ),
    *("_keep_what_others_gave", "_note_what_waits", "_place", "_requeue", "_with_flags"),
}
"""Attributes of classes in _compat."""

OPTIONAL = {
    *("_distributed", "_starting_state_dict", "_use_count", "_fsdp_param_group", "_fsdp_param_groups"),
    *("_StridedShardNotDecodableError", "_unsharded_dtensor_spec"),
    *("_get_reduce_dtype", "_post_backward_pending", "_reduce_scatter_param_indices", "_sharding_spec_by_dtype"),
}
"""Of datasets, which the tests do not need; of torch up to 2.12, from 2.13 or 2.15 on, and asked for where it is."""

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
    "transformers.masking_utils:find_packed_sequence_indices": ["position_ids"],
    "transformers.integrations.moe:_grouped_linear": ["input", "weight", "offs", "bias", "is_transposed"],
}
"""Of functions that are called by position, or that others take the place of."""


def private_attributes(path: Path) -> set[str]:
    """What code asks of objects, by a dot or by ``getattr`` and the like."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            found.update(x.value for x in node.args[1:2] if isinstance(x, ast.Constant))
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def own_names() -> set[str]:
    """Private names that the package gives: to its functions and classes, and to attributes of its objects."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
                found.update({ast.unparse(node).rpartition(".")[2]} if is_own else ())
    return found


def unlisted() -> set[str]:
    """What ``_compat`` uses and no test covers."""
    listed = OWN | OPTIONAL | {name for names in ATTRIBUTES.values() for name in names}
    return set().union(*map(private_attributes, COMPAT)) - listed
