"""Arguments of vLLM's LLM and EngineArgs that EngineConfig does not have: what becomes of each.

A program written for vLLM passes them. What changes no answer is passed over, and the log says so;
what asks for what there is anyway is dropped; the rest is refused by its name, with what to do.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from flexinfer.runtime.numbers import flag

logger = logging.getLogger(__name__)

OWN_NAMES = {
    "cudagraph_capture_sizes": "cuda_graph_sizes",
    "distributed_timeout_seconds": "distributed_timeout_s",
}
"""What has another name here."""
_WITHOUT_EFFECT = """
aggregate_engine_logging allowed_local_media_path allowed_media_domains attention_config
block_size code_revision collect_detailed_traces compilation_config cudagraph_metrics
disable_cascade_attn disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_log_requests disable_log_stats enable_cumem_allocator enable_flashinfer_autotune
enable_log_requests enable_logging_iteration_details enable_mfu_metrics enable_sleep_mode
fail_on_environ_validation fully_sharded_loras gdn_prefill_backend ignore_patterns kernel_config
kv_cache_metrics kv_cache_metrics_sample limit_mm_per_prompt linear_backend log_level
logging_config long_prefill_token_threshold max_cpu_loras max_cudagraph_capture_size
max_logprobs max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture
mm_processor_cache_gb mm_processor_cache_type moe_backend numa_bind numa_bind_cpus
numa_bind_nodes offload_backend optimization_level performance_mode prefix_caching_hash_algo
pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
safetensors_prefetch_num_threads scheduler_reserve_full_isl served_model_name
show_hidden_metrics_for_version skip_mm_profiling use_tqdm_on_load watermark
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""How fast, from where and with which log: no answer depends on it."""
SAME_HERE: Mapping[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "distributed_executor_backend": ("mp", "uni"),
    "logprobs_mode": ("raw_logprobs",),
    "model_impl": ("auto", "transformers"),
    "nnodes": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "worker_cls": ("auto",),
}
"""Values that mean what there is here; so do None, False, 0 and what is empty, of any argument."""
INSTEAD = {
    "additional_config": "it is for plugins of vLLM; leave it out",
    "convert": "models generate text here, and nothing else",
    "cpu_offload_gb": "weights stay on one device; quantization makes them smaller",
    "data_parallel_size": "`flexinfer serve --replicas` runs several engines behind one address",
    "distributed_executor_backend": "processes of this machine are what there is ('mp')",
    "enable_prompt_embeds": "prompts are text or token ids; leave it out",
    "hf_config_path": "hf_overrides changes values of the model's config",
    "kv_offloading_size": "swap_space takes the KV of preempted requests",
    "kv_transfer_config": "role='prefill' and 'decode' hand KV over: docs/scale_out.md",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs of "
    "SamplingParams choose tokens",
    "logprobs_mode": "log probabilities are the model's own ('raw_logprobs')",
    "mm_processor_kwargs": "there are no images; leave it out",
    "model_impl": "transformers' models are what is served ('auto', 'transformers')",
    "num_gpu_blocks_override": "kv_cache_memory_bytes says how much KV memory there is",
    "otlp_traces_endpoint": "traces are the server's: `flexinfer serve --otlp-traces-endpoint`",
    "pipeline_parallel_size": "tensor_parallel_size splits a model over processes",
    "pooler_config": "models generate text here, and nothing else",
    "quantization_config": "quantization='int8' or 'int4' quantises at load",
    "reasoning_parser": "it is the server's: `flexinfer serve --reasoning-parser`",
    "runner": "models generate text here ('generate')",
    "scheduler_cls": "scheduling_policy is 'fcfs', 'priority' or 'prefix'",
    "spec_method": "speculative_config={'method': ...} says it",
    "spec_model": "speculative_config={'model': ...} says it",
    "spec_tokens": "speculative_config={'num_speculative_tokens': ...} says it",
    "structured_outputs_config": "llguidance alone does this work; SamplingParams' "
    "structured_outputs says what a text must be",
    "task": "models generate text here ('generate')",
    "tokenizer_mode": "transformers' tokenizer is what is used ('auto')",
    "worker_cls": "processes cannot be exchanged; leave it out",
    "worker_extension_cls": "processes cannot be extended; leave it out",
}
"""What to do where another value is given."""


def translate(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those of `given` that are `known`, under their names here. Raises ValueError for what vLLM
    knows and nobody serves here, TypeError for a name that neither knows."""
    own = {OWN_NAMES.get(name, name): value for name, value in given.items()}
    others = {name: value for name, value in own.items() if name not in known}
    passed_over = [name for name in others if name in WITHOUT_EFFECT]
    for name, value in others.items():
        if name in WITHOUT_EFFECT or is_same_here(name, value):
            continue
        if name in INSTEAD:
            raise ValueError(f"{name}={value!r} is not served here: {INSTEAD[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ": leave it out"
        raise TypeError(f"there is no argument {name!r} here{hint}")
    if passed_over:
        logger.info("passed over, for they change no answer: %s", ", ".join(sorted(passed_over)))
    return {name: value for name, value in own.items() if name in known}


def advice(name: str) -> str | None:
    """What to do without an argument of vLLM's; None: of others there is nothing to say."""
    if name in WITHOUT_EFFECT:
        return "it changes no answer here: leave it out"
    return INSTEAD.get(name)


def note_remote_code(trust_remote_code: Any) -> None:
    """Raises ValueError for what is neither True nor False."""
    if flag("trust_remote_code", trust_remote_code):
        logger.warning(
            "trust_remote_code: no code of a model's repository is run here; the implementation "
            "is that of transformers"
        )


def is_same_here(name: str, value: Any) -> bool:
    """Whether the value of an argument of vLLM's asks for what there is anyway."""
    if name not in SAME_HERE and name not in INSTEAD:
        return False
    says_nothing = value is None or value is False or value == 0 or value in ("", [], {}, ())
    return says_nothing or value in SAME_HERE.get(name, ())
