"""Names of vLLM 0.32: what `vllm serve` and `LLM`, EngineArgs and AsyncEngineArgs take."""

from __future__ import annotations

SWITCHES = """
aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
data_parallel_multi_port_external_lb dcp_q_replicate disable_cascade_attn disable_chunked_mm_input
disable_custom_all_reduce disable_fastapi_docs disable_hybrid_kv_cache_manager disable_log_stats
disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log
enable_auto_tool_choice enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator
enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas
enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_nccl_comm_suspend
enable_offline_docs enable_per_request_metrics enable_prefix_caching enable_prompt_embeds
enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts enable_scale_out
enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh
enable_tokenizer_info_endpoint enable_tower_connector_lora enable_trace_replay enforce_eager
exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc headless
interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill
language_model_only log_error_stack long_prefill_token_threshold_adaptive mm_device_do_normalize
mm_encoder_only numa_bind ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids
scheduler_reserve_full_isl skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph
specialize_active_lora swa_bounded_replay tokens_only trust_remote_code trust_request_chat_template
trust_request_mm_kwargs use_fp64_gumbel use_replayssm use_tqdm_on_load
"""
"""Flags without a value."""
FLAGS = """
additional_config all2all_backend allowed_headers allowed_local_media_path allowed_methods
allowed_origins anthropic_disabled_thinking_effort api_server_count attention_backend
attention_config aux_output_config block_size chat_template chat_template_content_format
code_revision cohere_format compilation_config config config_format convert
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb custom_histogram_buckets
data_parallel_address data_parallel_backend data_parallel_rank data_parallel_rpc_port
data_parallel_size data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port
dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
decode_context_parallel_size default_chat_template_kwargs default_mm_loras device_ids
device_memory_utilization diffusion_config disable_access_log_for_endpoints
distributed_executor_backend distributed_timeout_seconds download_dir
dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
dp_sync_interval dtype ec_manager_config ec_transfer_config elastic_ep_max_dp_size engram_config
eplb_config expert_placement_strategy fault_tolerance_config fingerprint_mode fingerprint_value
gdn_prefill_backend generation_config gpu_memory_utilization grpc_port h11_max_header_count
h11_max_incomplete_event_size hf_config_path hf_overrides hf_token host io_processor_plugin
ir_op_priority jit_monitor_mode kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
kv_cache_memory_bytes kv_cache_metrics_sample kv_events_config kv_offloading_backend
kv_offloading_size kv_transfer_config limit_mm_per_prompt linear_backend load_format log_config_file
log_level logging_config logprobs_mode long_prefill_token_threshold lora_dtype mamba_backend
mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype
mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size max_log_len
max_logprobs max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs
max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
max_num_seqs max_parallel_loading_workers media_io_kwargs middleware mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl
model_loader_extra_config moe_backend nnodes node_rank num_gpu_blocks_override offload_backend
offload_group_size offload_num_in_group offload_prefetch_step optimization_level
otlp_traces_endpoint override_generation_config per_request_spec_decode_metrics performance_mode
pipeline_parallel_size pooler_config port prefill_context_parallel_size prefill_schedule_interval
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit profiler_config
pt_load_map_location quantization quantization_config reasoning_config reasoning_parser
reasoning_parser_plugin renderer_num_workers replayssm_buffer_len response_role revision root_path
runner safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
scheduler_cls scheduling_policy seed show_hidden_metrics_for_version shutdown_timeout
sparse_indexer_topk_backend spec_method spec_model spec_tokens speculative_config
sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
stream_interval structured_outputs_config tensor_parallel_size tokenizer tokenizer_mode
tokenizer_revision tool_call_parser tool_parser_plugin tool_server tool_strict_level ubatch_size uds
uvicorn_log_level video_pruning_method video_pruning_rate watermark watermark_config
weight_transfer_config worker_cls worker_extension_cls
"""
"""Flags with one value."""
FLAGS_OF_MANY = """
allowed_media_domains api_key collect_detailed_traces cpu_offload_params cudagraph_capture_sizes
ignore_patterns kv_cache_dtype_skip_layers logits_processors lora_modules lora_target_modules
numa_bind_cpus numa_bind_nodes offload_params served_model_name sleep_preserve_parameter_names
"""
"""Flags with one or several values."""
ARGUMENTS_ALONE = """
_api_process_count _api_process_rank enable_mm_processor_stats mamba_config model_weights
"""
"""Arguments that are no flags."""
SHORT_FLAGS = {
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
}
"""And what they are short for."""
