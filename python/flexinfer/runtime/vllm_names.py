"""Names of vLLM's settings that there are not here, and what becomes of each.

Of its LLM, EngineArgs and `vllm serve` (0.32, and some of earlier ones). A name has one meaning: it
changes no answer, it has another name here, or there is something to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_NAMES = {
    "cudagraph_capture_sizes": "cuda_graph_sizes",
    "distributed_timeout_seconds": "distributed_timeout_s",
}
"""What has another name here."""
_WITHOUT_EFFECT = """
_api_process_count _api_process_rank aggregate_engine_logging all2all_backend
allow_deprecated_quantization allowed_local_media_path allowed_media_domains api_server_count
attention_config block_size code_revision cohere_format cohere_is_reasoning_model
collect_detailed_traces compilation_config cp_kv_cache_interleave_size
cpu_distributed_timeout_seconds cpu_offload_params cuda_graph_sizes cudagraph_metrics
custom_histogram_buckets data_parallel_address data_parallel_backend data_parallel_rpc_port
data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold
dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate disable_access_log_for_endpoints
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
disable_nccl_for_dp_synchronization disable_uvicorn_access_log dp_supervisor_probe_failure_threshold
dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval ec_manager_config
elastic_ep_max_dp_size enable_batch_sharded_sampling enable_cumem_allocator enable_dbo
enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
enable_flash_late_interaction enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
enable_log_deltas enable_log_requests enable_logging_iteration_details
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format
enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
enable_offline_docs enable_prompt_tokens_details enable_request_id_headers enable_shm_tensor_arena
enable_sleep_mode enable_tokenizer_info_endpoint enable_tower_connector_lora eplb_config
expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras
gdn_prefill_backend h11_max_header_count h11_max_incomplete_event_size ignore_patterns
interleave_mm_strings ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend
kda_prefill_backend kernel_config kv_cache_metrics kv_cache_metrics_sample kv_offloading_backend
kv_sharing_fast_prefill language_model_only limit_mm_per_prompt linear_backend log_config_file
log_error_stack log_level logging_config long_prefill_token_threshold
long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_mode
mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm master_addr master_port max_cpu_loras
max_cudagraph_capture_size max_log_len max_logprobs max_lora_cls_labels max_num_active_seqs
max_num_partial_prefills max_num_scheduled_tokens max_parallel_loading_workers
max_seq_len_to_capture media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb
mm_tensor_ipc model_loader_extra_config moe_backend numa_bind numa_bind_cpus numa_bind_nodes
offload_backend offload_num_in_group offload_params offload_prefetch_step optimization_level
performance_mode prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit pt_load_map_location ray_workers_use_nsight renderer_num_workers
replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size
safetensors_prefetch_num_threads scheduler_reserve_full_isl served_model_name
show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph
sleep_preserve_parameter_names sparse_indexer_topk_backend specialize_active_lora swa_bounded_replay
trust_request_mm_kwargs ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
uvicorn_log_level video_pruning_method video_pruning_rate watermark
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""How fast, from where and with which log; what there always is; what says more of something that
is refused by another name: no answer depends on it."""
SAME_HERE: Mapping[str, tuple[Any, ...]] = {
    "anthropic_disabled_thinking_effort": ("auto",),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "decode_context_parallel_size": (1,),
    "distributed_executor_backend": ("mp", "uni"),
    "fingerprint_mode": ("full", "hash"),
    "logprobs_mode": ("raw_logprobs",),
    "lora_dtype": ("auto",),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "model_impl": ("auto", "transformers"),
    "nnodes": (1,),
    "per_request_spec_decode_metrics": ("none",),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "response_role": ("assistant",),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "tool_strict_level": ("auto",),
    "worker_cls": ("auto",),
}
"""Values that mean what there is here; so do None, False, 0 and what is empty, of any argument."""
SAME_FIELDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "aux_output_config": {},
    "profiler_config": {},
    "structured_outputs_config": {"backend": ("auto", "guidance")},
}
"""The same of the fields of a mapping, or of its JSON."""

_ONE_DEVICE = "weights stay on one device; quantization makes them smaller"
_REPLICAS = "`flexinfer serve --replicas` runs several engines behind one address"
_SPLIT = "tensor_parallel_size splits a model over processes"
_ONE_MACHINE = "processes of this machine are what there is; tensor_parallel_size says how many"
_GENERATES = "models generate text here, and nothing else"
_NO_IMAGES = "there are no images; leave it out"
_OWN_PARSERS = "parsers are built in: docs/server.md names them"
_STATES = "recurrent states have the types that the model gives them ('auto')"
_NOT_TOLD = "answers do not tell it; leave it out"
_HTTP = "HTTP is what is served; leave it out"
INSTEAD = {
    "additional_config": "it is for plugins of vLLM; leave it out",
    "anthropic_disabled_thinking_effort": "thinking that is disabled is enable_thinking=false "
    "for the chat template",
    "aux_output_config": _NOT_TOLD,
    "config_format": "config.json is what is read ('hf')",
    "convert": _GENERATES,
    "cpu_offload_gb": _ONE_DEVICE,
    "data_parallel_external_lb": _REPLICAS,
    "data_parallel_hybrid_lb": _REPLICAS,
    "data_parallel_multi_port_external_lb": _REPLICAS,
    "data_parallel_rank": _REPLICAS,
    "data_parallel_size": _REPLICAS,
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_start_rank": _REPLICAS,
    "decode_context_parallel_size": _SPLIT,
    "default_mm_loras": _NO_IMAGES,
    "device_ids": "device='cuda:1' is one of them, CUDA_VISIBLE_DEVICES says which there are",
    "diffusion_config": "models write one token after another here; leave it out",
    "disable_fastapi_docs": "/docs tells nobody more than this version does; a proxy can hide it",
    "disable_sliding_window": "windows are as the model has them; max_model_len bounds a context",
    "distributed_executor_backend": "processes of this machine are what there is ('mp')",
    "ec_transfer_config": _NO_IMAGES,
    "enable_fault_tolerance": "a supervisor starts a server anew that has gone down",
    "enable_log_outputs": "what models write is in no log; otlp_traces_endpoint tells of requests",
    "enable_mamba_cache_stochastic_rounding": _STATES,
    "enable_per_request_metrics": "/metrics and --otlp-traces-endpoint tell times",
    "enable_prompt_embeds": "prompts are text or token ids; leave it out",
    "enable_return_routed_experts": _NOT_TOLD,
    "enable_scale_out": "docs/scale_out.md says how prefill and decode are split here",
    "enable_server_load_tracking": "/metrics tells what runs and what waits",
    "enable_ssl_refresh": "a server reads its certificate when it starts: start it anew",
    "enable_trace_replay": "output_token_ids of a prompt say how its answer begins",
    "engram_config": "no model with such embeddings is served; leave it out",
    "fingerprint_mode": "system_fingerprint is made of model and settings ('full')",
    "fingerprint_value": "system_fingerprint is made of model and settings; leave it out",
    "grpc": _HTTP,
    "grpc_port": _HTTP,
    "headless": _ONE_MACHINE,
    "hf_config_path": "hf_overrides changes values of the model's config",
    "io_processor_plugin": "there are no plugins; leave it out",
    "kv_cache_dtype_skip_layers": "kv_cache_dtype is that of all layers",
    "kv_offloading_size": "swap_space takes the KV of preempted requests",
    "kv_transfer_config": "role='prefill' and 'decode' hand KV over: docs/scale_out.md",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs of "
    "SamplingParams choose tokens",
    "logprobs_mode": "log probabilities are the model's own ('raw_logprobs')",
    "lora_dtype": "adapters are computed in the model's type ('auto')",
    "lora_target_modules": "an adapter's own config says which modules it changes",
    "mamba_cache_dtype": _STATES,
    "mamba_ssm_cache_dtype": _STATES,
    "max_num_queued_reqs": "`flexinfer serve --max-queue-len` bounds what waits",
    "max_num_queued_tokens": "`flexinfer serve --max-queue-len` bounds what waits",
    "middleware": "a proxy before the server can do such work",
    "mm_encoder_only": _GENERATES,
    "mm_processor_kwargs": _NO_IMAGES,
    "model_class_overrides": "transformers' models are what is served",
    "model_impl": "transformers' models are what is served ('auto', 'transformers')",
    "model_weights": "model is the folder or hub id with the weights",
    "nnodes": _ONE_MACHINE,
    "node_rank": _ONE_MACHINE,
    "num_gpu_blocks_override": "kv_cache_memory_bytes says how much KV memory there is",
    "offload_group_size": _ONE_DEVICE,
    "otlp_traces_endpoint": "traces are the server's: `flexinfer serve --otlp-traces-endpoint`",
    "per_request_spec_decode_metrics": "/metrics and get_metrics() count what was accepted",
    "pipeline_parallel_size": _SPLIT,
    "pooler_config": _GENERATES,
    "prefill_context_parallel_size": _SPLIT,
    "profiler_config": "py-spy, or torch.profiler around a call, tells where time goes",
    "quantization_config": "quantization='int8' or 'int4' quantises at load",
    "reasoning_config": "`flexinfer serve --reasoning-parser` says how reasoning is marked",
    "reasoning_parser": "it is the server's: `flexinfer serve --reasoning-parser`",
    "reasoning_parser_plugin": _OWN_PARSERS,
    "response_role": "answers are the assistant's ('assistant')",
    "return_sampling_mask": _NOT_TOLD,
    "return_tokens_as_token_ids": "return_token_ids of a request tells ids beside the text",
    "runner": "models generate text here ('generate')",
    "scheduler_cls": "scheduling_policy is 'fcfs', 'priority' or 'prefix'",
    "skip_tokenizer_init": "a server needs the tokenizer; `LLM(skip_tokenizer_init=True)` does not",
    "spec_method": "speculative_config={'method': ...} says it",
    "spec_model": "speculative_config={'model': ...} says it",
    "spec_tokens": "speculative_config={'num_speculative_tokens': ...} says it",
    "sse_keep_alive_interval": "streams have no comments; let the proxy wait longer",
    "ssl_ciphers": "those of Python's ssl module are offered; leave it out",
    "structured_outputs_config": "llguidance alone does this work ('auto', 'guidance'); "
    "SamplingParams' structured_outputs says what a text must be",
    "task": "models generate text here ('generate')",
    "tokenizer_mode": "transformers' tokenizer is what is used ('auto')",
    "tokens_only": "prompts may be token ids at every endpoint; leave it out",
    "tool_parser_plugin": _OWN_PARSERS,
    "tool_server": "callers run their tools themselves; leave it out",
    "tool_strict_level": "`strict` of a tool says it",
    "trust_request_chat_template": "--chat-template is the operator's; requests have "
    "chat_template_kwargs",
    "watermark_config": "answers have no watermark; leave it out",
    "weight_transfer_config": "weights are read from files when the engine starts",
    "worker_cls": "processes cannot be exchanged; leave it out",
    "worker_extension_cls": "processes cannot be extended; leave it out",
}
"""What to do where another value is given."""
