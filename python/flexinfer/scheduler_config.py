"""SchedulerConfig: the limits and switches of the scheduler, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass

from flexinfer.runtime.json_options import require_choice
from flexinfer.runtime.numbers import positive

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_STATE_SNAPSHOT_TOKENS = 1024
DEFAULT_MAX_LORAS = 8
SCHEDULING_POLICIES = ("fcfs", "priority", "prefix")
PREEMPTION_MODES = ("recompute", "swap", "auto", "off")


@dataclass(frozen=True)
class SchedulerConfig:
    """None of them hangs on the model, but for `max_model_len`."""

    max_model_len: int
    """Most tokens of one request, prompt and output together."""
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    """Most requests that run at the same time: one slot of the arena each."""
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    """Most tokens that one step computes."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """Split a long prompt over several steps; off: a prompt is computed in one step."""
    wait_for_shared_prefix: bool = True
    """A request waits for a running prefill of the same prefix instead of computing it twice."""
    min_shared_tokens: int = 16
    """Waiting pays only if at least this many tokens more become shareable."""
    admission_reserve: float = 0.01
    """Fraction of the budget left free at admission, so that running requests can grow."""
    scheduling_policy: str = "priority"
    """"fcfs", "priority" or "prefix"; see queue.py."""
    max_passed_over: int = 64
    """Admissions that may go before a waiting request, beyond those that were queued before it."""
    preemption_mode: str = "auto"
    """"recompute", "swap", "auto" or "off"; see preemption.py."""
    has_swap_space: bool = False
    enable_pre_extend: bool = True
    """Map the memory of the next steps in the background."""
    state_snapshot_tokens: int = DEFAULT_STATE_SNAPSHOT_TOKENS
    """See `EngineConfig`."""
    label_vtensors: bool = False
    """Tell the manager the request id of each vTensor, for a trace."""
    max_loras: int = DEFAULT_MAX_LORAS
    """Most adapters of the requests that run."""
    to_export: bool = False
    """What is computed goes to another process: it lies apart, and is pinned until then."""

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "min_shared_tokens")
        for name in (*sizes, "max_passed_over"):
            positive(name, getattr(self, name))
        require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        require_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        if not 0.0 <= self.admission_reserve < 1.0:
            raise ValueError(f"admission_reserve must be in [0, 1), got {self.admission_reserve!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request decodes one token "
                "per step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill, max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len}): a prompt is one step"
            )
