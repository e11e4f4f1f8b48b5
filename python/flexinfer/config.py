"""Settings of the engine: frozen, checked where they are made, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flexinfer.events.config import KVEventsConfig
from flexinfer.handover.roles import check_role
from flexinfer.runtime.json_options import read_mapping, require_choice
from flexinfer.runtime.numbers import flag, positive, real, whole
from flexinfer.runtime.units import parse_bytes, parse_count
from flexinfer.scheduler_config import (
    DEFAULT_MAX_LORAS,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_STATE_SNAPSHOT_TOKENS,
    PREEMPTION_MODES,
    SCHEDULING_POLICIES,
    SchedulerConfig,
)
from flexinfer.speculative_config import SpeculativeConfig

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"float": "float32", "half": "float16"}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
KV_CACHE_DTYPES = {"auto": "auto", "int8": "int8", "fp8_e4m3": "fp8_e4m3", "fp8": "fp8_e4m3"}
MAX_NUM_SEQS = 1 << 16
"""Each has a slot with page tables, whether it is used or not."""
MAX_COUNT = (1 << 31) - 1
"""Of tokens: kernels count them in 32 bits."""

DEFAULT_IF_NONE = (
    "attention_backend",
    "distributed_timeout_s",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_num_seqs",
    "seed",
)


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set; None means: derived from the model or the machine. Of some that vLLM
    has None for it means the default, too (`DEFAULT_IF_NONE`)."""

    model: Any
    """A local folder, a GGUF file, a hub id, or a loaded transformers model."""
    tokenizer: Any = None
    """A local folder, a hub id, or a loaded tokenizer; None: that of the model."""
    skip_tokenizer_init: bool = False
    revision: str | None = None
    """Of a hub id: branch, tag or commit; None: its main branch."""
    tokenizer_revision: str | None = None
    """The same of the tokenizer; None: the model's, if it is of the same repository."""
    download_dir: str | os.PathLike[str] | None = None
    """Where what the hub has is kept; None: in its own cache (HF_HOME)."""
    hf_token: str | bool | None = field(default=None, repr=False)
    """For repositories that not everybody may read; None or True: that of `hf auth login`."""
    load_format: str = "auto"
    """"auto" (what there is), "safetensors", "gguf", or "dummy": random weights, of a config."""
    hf_overrides: Mapping[str, Any] | str | None = None
    """What config.json is to have in place of its own values: a mapping, or its JSON, such as
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}; mappings in it are merged."""
    generation_config: str | os.PathLike[str] = "auto"
    """Where it says how requests are sampled that do not say so themselves: "auto": the model's
    generation_config.json, or its GGUF file; "vllm": nowhere, they have OpenAI's defaults; else a
    folder, whose max_new_tokens bounds all answers of a server."""
    override_generation_config: Mapping[str, Any] | str | None = None
    """What goes before it: a mapping with names of generation_config.json, or its JSON; None as a
    value: OpenAI's default. Its max_new_tokens bounds all answers of a server, too."""
    dtype: Any = "auto"
    quantization: str | None = None
    """What weights are quantised to at load: "int8", or "int4", with a group size, zero points and
    inputs of 8 bits if wanted ("int4-g64-zp-a8"). "a8": the weights of a checkpoint that is
    quantised already, and inputs of 8 bits. None or "auto": as the checkpoint is, quantised already
    or not."""
    kv_cache_dtype: str = "auto"
    """"auto": the model's; "int8" or "fp8_e4m3" ("fp8" too): a byte for each number of K and V, and
    a scale for each token and head (on the CPU)."""
    device: str | None = None
    seed: int = 0
    """Of requests without one of their own."""
    max_model_len: int | None = None
    """Most tokens of a request, also as "8k" (8,000) or "8K" (8,192); None, -1 or "auto": what the
    model can, as far as the memory goes."""
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    wait_for_shared_prefix: bool = True
    state_snapshot_tokens: int = DEFAULT_STATE_SNAPSHOT_TOKENS
    """Of models with a recurrent state: it is kept for the prefix cache at multiples of so many
    tokens, at which prefills stop, and at the ends of prompts and turns; 0: there alone."""
    kv_cache_memory_bytes: int | str | None = None
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory for weights, activations and KV, unless `kv_cache_memory_bytes` says
    how much KV gets."""
    chunk_bytes: int | str | None = None
    layers_per_plane: int | None = None
    attention_backend: str = "auto"
    """"auto", "flash", "host", "sdpa", "two_phase" or vLLM's names; see attention/__init__.py."""
    enforce_eager: bool = False
    """Do not capture decode steps in CUDA graphs."""
    cuda_graph_sizes: tuple[int, ...] | None = None
    """Batch sizes to capture; None: 1, 2, 4, 8, 16, 24, ... up to max_num_seqs."""
    stream_interval: int | None = 1
    """Tokens between two outputs of a request, after the first: more of them cost a stream less.
    None: one with few streams, with many those of up to 50 ms; see stream_pace.py."""
    threads: int | None = None
    """CPU threads of torch and the kernels; None: one for each core that the process may use."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster steps."""
    enable_lora: bool = False
    """Requests may choose LoRA adapters; see docs/lora.md."""
    max_loras: int = DEFAULT_MAX_LORAS
    """Most adapters in one batch."""
    max_lora_rank: int = 16
    scheduling_policy: str = "priority"
    """"fcfs", "priority" (of equals the first come first) or "prefix"; see queue.py."""
    max_passed_over: int = 64
    """Bound on starvation; see queue.py."""
    preemption_mode: str = "auto"
    """"recompute", "swap", "auto" (by cost) or "off" (a shortage ends requests)."""
    swap_space: int | str = 0
    """Host bytes for the KV of swapped requests; 0: preemption recomputes."""
    swap_directory: str | None = None
    """Where swapped and sleeping KV goes, as unlinked files; None: host memory."""
    async_scheduling: bool | None = None
    """Schedule a step while the one before it is computed. None: where the device works beside the
    CPU, that is on CUDA."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    """Propose tokens ahead: a mapping with vLLM's names, or its JSON; see `SpeculativeConfig`."""
    enable_pre_extend: bool = True
    """Map the memory of the next steps in the background (paper, Algorithm 1)."""
    enable_deferred_reclamation: bool = True
    """Keep released slots mapped for the next request."""
    eager_allocation: bool = True
    """Have the worker create chunks ahead of need, up to `free_memory_low`."""
    free_memory_low: int | str | None = None
    """Free bytes below which the worker creates chunks, a quarter of that while steps run; None:
    2 MiB in each plane for each request that may run, at most 1/16 of the budget."""
    free_memory_high: int | str | None = None
    """Free bytes above which the worker gives chunks back to the system; None: it keeps them."""
    prefix_cache_memory: int | str | None = None
    """Bytes of KV that no request uses, kept for requests with the same prefix, beyond which the
    least recently used is reused before more memory is taken from the system. None: one eighth of
    the budget on the CPU, whose memory others need too, all of it on CUDA; both follow the budget
    when it is changed, a number stays. Free memory kept ready (`free_memory_low`) is part of it."""
    enable_dedup: bool = True
    """Map prefixes that were computed twice onto one set of chunks."""
    tensor_parallel_size: int = 1
    """Processes that share the model: each has its part of the weights and of the KV heads. Sizes
    of memory are those of each of them; see docs/scale_out.md."""
    distributed_timeout_s: float = 30.0
    """Seconds after which a process that does not take part in a sum is held to hang."""
    distributed_check_interval: int = 1000
    """Steps between two comparisons of what the processes' managers hold."""
    kv_events_config: KVEventsConfig | Mapping[str, Any] | str | None = None
    """Publish which blocks of tokens are cached, for routers: a mapping with vLLM's names, or its
    JSON; see `KVEventsConfig`."""
    role: str = "both"
    """"prefill": computes KV for other processes; "decode": takes theirs; "both": neither."""
    trace: str | None = None
    """File to which every memory operation is written, with time and request."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is None and item.name in DEFAULT_IF_NONE:
                object.__setattr__(self, item.name, item.default)
            if item.type == "bool":
                flag(item.name, getattr(self, item.name))
        for name in ("max_num_seqs", "max_loras", "max_lora_rank"):
            self._set_positive(name, MAX_NUM_SEQS)
        self._read_counts()
        sizes = ("max_num_batched_tokens", "stream_interval", "max_model_len", "layers_per_plane")
        for name in sizes:
            if getattr(self, name) is not None:
                self._set_positive(name, MAX_COUNT)
        for name in ("state_snapshot_tokens", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if (every := self.state_snapshot_tokens) < 0:
            raise ValueError(
                "state_snapshot_tokens must be a number of tokens, or 0 for the ends of prompts "
                f"and turns alone, got {every!r}"
            )
        for name in ("kv_cache_memory_bytes", "chunk_bytes"):
            if not isinstance(getattr(self, name), (str, type(None))):
                positive(name, getattr(self, name))
        self._check_memory_settings()
        self._check_parallel_settings()
        check_role(self)
        self._check_gpu_settings()
        self._check_speculation()
        self._check_generation_config()
        object.__setattr__(self, "hf_overrides", self.overrides)
        if self.kv_events_config is not None:
            parsed = KVEventsConfig.parse(self.kv_events_config)
            object.__setattr__(self, "kv_events_config", parsed)
            if parsed.is_on and not self.enable_prefix_caching:
                raise ValueError(
                    "kv_events_config needs prefix caching: without it nothing is cached to tell of"
                )
        if self.dtype != "auto" and dtype_name(self.dtype) not in SUPPORTED_DTYPES:
            choices = ", ".join(("auto", *SUPPORTED_DTYPES))
            raise ValueError(f"dtype must be one of {choices}, got {self.dtype!r}")

    def _read_counts(self) -> None:
        """Numbers of tokens as people write them."""
        if self.max_model_len in (-1, "-1", "auto"):
            object.__setattr__(self, "max_model_len", None)
        for name in ("max_model_len", "max_num_batched_tokens"):
            given = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, parse_count(name, given))

    def _set_positive(self, name: str, most: int) -> None:
        object.__setattr__(self, name, positive(name, getattr(self, name), most))

    def _check_memory_settings(self) -> None:
        positive("max_passed_over", self.max_passed_over)
        require_choice("load_format", self.load_format, LOAD_FORMATS)
        require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        require_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        require_choice("kv_cache_dtype", self.kv_cache_dtype, list(KV_CACHE_DTYPES))
        object.__setattr__(self, "kv_cache_dtype", KV_CACHE_DTYPES[self.kv_cache_dtype])
        for name in ("swap_space", "free_memory_low", "free_memory_high", "prefix_cache_memory"):
            value = getattr(self, name)
            if value is not None or name == "swap_space":
                parse_bytes(value, name)
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError('preemption_mode "swap" needs swap_space, in bytes')
        if self.compile and self.enable_lora:
            raise ValueError("enable_lora does not go with compile: adapters change by the step")

    def _check_parallel_settings(self) -> None:
        positive("tensor_parallel_size", self.tensor_parallel_size)
        positive("distributed_check_interval", self.distributed_check_interval)
        timeout_s = real("distributed_timeout_s", self.distributed_timeout_s)
        if timeout_s <= 0:
            raise ValueError(f"distributed_timeout_s must be positive, got {timeout_s}")
        if self.tensor_parallel_size == 1:
            return
        for name, reason in (
            ("enable_lora", "adapters are not split over ranks"),
            ("async_scheduling", "all ranks begin a step together"),
        ):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with tensor_parallel_size > 1: {reason}")
        if self.load_format == "dummy":
            raise ValueError(
                "load_format='dummy' does not go with tensor_parallel_size > 1: each rank reads "
                "its part of weights that there are"
            )
        if not isinstance(self.model, (str, os.PathLike)):
            raise ValueError(
                "tensor_parallel_size > 1 takes a folder or hub id: each rank reads its own part "
                f"of the weights. The model given is a loaded {type(self.model).__name__}"
            )

    def _check_gpu_settings(self) -> None:
        part = self.gpu_memory_utilization
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {part!r}")
        if self.cuda_graph_sizes is not None:
            sizes = tuple(self.cuda_graph_sizes)
            object.__setattr__(self, "cuda_graph_sizes", sizes)
            for size in sizes:
                positive("each of cuda_graph_sizes", size)
            if not any(size <= self.max_num_seqs for size in sizes):
                raise ValueError(
                    f"cuda_graph_sizes {sizes} has no batch size up to max_num_seqs "
                    f"({self.max_num_seqs}); enforce_eager=True turns CUDA graphs off"
                )

    def _check_speculation(self) -> None:
        if self.speculative_config is None:
            return
        parsed = SpeculativeConfig.parse(self.speculative_config)
        object.__setattr__(self, "speculative_config", parsed)
        if self.async_scheduling:
            raise ValueError(
                "speculative_config and async_scheduling exclude each other: what is proposed "
                "hangs on the tokens of the step before"
            )
        if parsed.method == "draft_model" and self.tensor_parallel_size > 1:
            raise ValueError(
                'speculative_config: method "draft_model" does not go with tensor_parallel_size > '
                '1: a draft model is not split over ranks; there is "ngram"'
            )

    def _check_generation_config(self) -> None:
        source, given = self.generation_config, self.override_generation_config
        if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
            raise ValueError(f"generation_config must be a text or a path, got {source!r}")
        if given is None:
            return
        from flexinfer.sampling.defaults import NAMES, SamplingDefaults  # it loads the core

        name = "override_generation_config"
        parsed = dict(read_mapping(name, given))
        if unknown := [str(key) for key in parsed if key not in NAMES]:
            raise ValueError(
                f"{name} has {', '.join(unknown)}, which is not supported; it may have "
                f"{', '.join(NAMES)}"
            )
        try:
            SamplingDefaults.of(parsed, is_limit=True)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        object.__setattr__(self, name, parsed)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, parsed."""
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.parse(given)

    @property
    def overrides(self) -> dict[str, Any] | None:
        """`hf_overrides`, parsed."""
        given = self.hf_overrides
        return None if given is None else dict(read_mapping("hf_overrides", given))

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """`kv_events_config`, parsed; None where events are off."""
        if self.kv_events_config is None:
            return None
        parsed = KVEventsConfig.parse(self.kv_events_config)
        return parsed if parsed.is_on else None

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part, for the `max_model_len` that was chosen."""
        batched = self.max_num_batched_tokens
        if batched is None:
            batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                batched = max(batched, max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=batched,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            wait_for_shared_prefix=self.wait_for_shared_prefix,
            state_snapshot_tokens=self.state_snapshot_tokens,
            scheduling_policy=self.scheduling_policy,
            max_passed_over=self.max_passed_over,
            preemption_mode=self.preemption_mode,
            has_swap_space=self.swap_space != 0,
            enable_pre_extend=self.enable_pre_extend,
            label_vtensors=self.trace is not None,
            max_loras=self.max_loras,
            to_export=self.role == "prefill",
        )


def dtype_name(dtype: Any) -> str:
    """'float32' for "float32", "torch.float32", torch.float32, and "float", as torch calls it."""
    return DTYPE_ALIASES.get(name := str(dtype).removeprefix("torch."), name)
