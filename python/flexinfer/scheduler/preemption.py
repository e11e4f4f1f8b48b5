"""Preemption: how a request gives its memory up when it is short, and what that costs. No torch.

    recompute   forget the KV, compute it again later; recorded prefixes are found again
    swap        move the KV to the host store, and back to the same addresses
    auto        the cheaper of the two, by measured speeds
    off         the request ends with an error instead

Source: PagedAttention (Kwon et al., SOSP 2023), section 4.5. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

PREFILL_TOKENS_PER_S = 2000.0
SWAP_BYTES_PER_S = 1e9
"""Speeds that are assumed until the first are measured."""

Cause = Literal["growth", "activations", "budget lowered"]
"""What memory is taken for."""
Reason = Literal["configured", "cheaper", "no swap space", "swap space is full", "row of a fork"]
REASONS: dict[str, tuple[Reason, ...]] = {
    "recompute": get_args(Reason),
    "swap": ("configured", "cheaper"),
}
"""mode -> why it is this one."""


def all_counts() -> dict[tuple[str, ...], float]:
    """0 for each (mode, reason) that `PreemptionPolicy.counts` may have."""
    return {
        (mode, f"{cause}: {reason}"): 0
        for mode, reasons in REASONS.items()
        for cause in get_args(Cause)
        for reason in reasons
    }


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a victim, and why."""

    mode: Literal["recompute", "swap"]
    reason: Reason


class PreemptionPolicy:
    """Chooses between recompute and swap, learns their speeds, counts."""

    def __init__(self, mode: str, has_swap_space: bool = True, smoothing: float = 0.3) -> None:
        self.mode = mode
        self.has_swap_space = has_swap_space
        self.smoothing = smoothing
        self.prefill_tokens_per_s: float | None = None
        self.swap_bytes_per_s: float | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        """(mode, reason) -> preemptions."""

    @property
    def is_on(self) -> bool:
        return self.mode != "off"

    def choose(self, num_lost_tokens: int, num_out_bytes: int, num_in_bytes: int) -> Decision:
        """Recompute `num_lost_tokens`, or move bytes out and back in.

        Recorded prefixes are counted as free by the caller: neither computed nor moved in.
        """
        if self.mode == "recompute":
            return Decision("recompute", "configured")
        if not self.has_swap_space:
            return Decision("recompute", "no swap space")
        if self.mode == "swap":
            return Decision("swap", "configured")
        prefill_speed = self.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
        swap_speed = self.swap_bytes_per_s or SWAP_BYTES_PER_S
        recompute_s = num_lost_tokens / prefill_speed
        swap_s = (num_out_bytes + num_in_bytes) / swap_speed
        return Decision("swap" if swap_s < recompute_s else "recompute", "cheaper")

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that was mostly prefill computed `num_tokens` tokens."""
        if seconds > 0:
            self.prefill_tokens_per_s = self._average(
                self.prefill_tokens_per_s, num_tokens / seconds
            )

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """`num_bytes` bytes were moved, in one direction."""
        if seconds > 0 and num_bytes > 0:
            self.swap_bytes_per_s = self._average(self.swap_bytes_per_s, num_bytes / seconds)

    def count(self, decision: Decision, cause: Cause) -> None:
        self.counts[decision.mode, f"{cause}: {decision.reason}"] += 1

    def counts_by_mode(self) -> dict[str, dict[str, int]]:
        """mode -> reason -> preemptions."""
        out: dict[str, dict[str, int]] = {"recompute": {}, "swap": {}}
        for (mode, reason), count in self.counts.items():
            out[mode][reason] = count
        return out

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.smoothing * (new - old)
