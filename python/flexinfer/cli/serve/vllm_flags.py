"""Flags of `vllm serve` (0.32) as they are written: short forms, and how many values follow."""

from __future__ import annotations

from collections.abc import Mapping

OWN_FLAGS: Mapping[str, str] = {
    "device_memory_utilization": "gpu_memory_utilization",
    "distributed_timeout_s": "distributed_timeout",
}
"""Names that the flag here does not have."""
SHORT: Mapping[str, str] = {
    "-O": "optimization_level",
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-r": "node_rank",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}
_SWITCHES = """
aggregate_engine_logging allow_deprecated_quantization cohere_is_reasoning_model cudagraph_metrics
data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
dcp_q_replicate disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
disable_fastapi_docs disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log
enable_batch_sharded_sampling enable_cumem_allocator enable_dbo enable_elastic_ep
enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
enable_flash_late_interaction enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
enable_log_deltas enable_log_outputs enable_log_requests enable_logging_iteration_details
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_nccl_comm_suspend
enable_offline_docs enable_per_request_metrics enable_prompt_embeds enable_prompt_tokens_details
enable_request_id_headers enable_return_routed_experts enable_scale_out enable_server_load_tracking
enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint
enable_tower_connector_lora enable_trace_replay
fail_on_environ_validation fully_sharded_loras grpc headless interleave_mm_strings
jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack
long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only numa_bind
ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl
skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora
swa_bounded_replay tokens_only trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel
use_replayssm use_tqdm_on_load
"""
SWITCHES = frozenset(_SWITCHES.split())
"""Of those that there are not here the ones without a value."""
_OF_SEVERAL = """
allowed_media_domains collect_detailed_traces cpu_offload_params cuda_graph_sizes ignore_patterns
kv_cache_dtype_skip_layers logits_processors lora_target_modules numa_bind_cpus numa_bind_nodes
offload_params sleep_preserve_parameter_names
"""
OF_SEVERAL = frozenset(_OF_SEVERAL.split())
"""And those with one or several."""
