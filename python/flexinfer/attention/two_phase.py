"""Two-phase attention (ChunkAttention, section 3.2): KV that requests share is read once for all.

    chunk-first      | shared by r0 r1 r2 | shared by r0 r1 |     one call a range, for the queries
                                                                  of all its members together
    sequence-first                                 r0's suffix    one call per request
                                                   r1's suffix
                                          r2's suffix

Each call gives a partial result and its log-sum-exp, and partial results are merged by online
softmax. Algorithms 1 and 2 go over the chunks of a prefix tree; here a range is contiguous in any
member's vTensor, so that a call is one call of a plain kernel that returns log-sum-exp.

Only decodes are computed this way: a prefill chunk has many query rows and reads KV once for all of
them. Layers with windows, chunks, soft caps or sinks go the way of SdpaAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flexinfer.attention.base import AttentionMetadata, AttentionOptions, LayerKV, store_kv
from flexinfer.attention.sdpa import SdpaAttention, head_views
from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost
from flexinfer.runtime.transfer import to_device

Rows = slice | torch.Tensor
"""Which entries of a first dimension: int64 on the arena's device where it is no slice."""

# What two phases save and cost by torch's kernels on the CPU, measured with one thread of a Xeon
# (Sapphire Rapids) on 2026-11-21: docs/two_phase.md has the numbers. On the cautious side, so that
# sharing is never the slower way. Both sides of the balance run on the same cores, so that other
# processors and more threads change it little.
CPU_ELEMENTS_PER_US = 10000.0
"""Elements of K and V. Shared chunks are one memory, so that repeated reads of short ranges hit the
cache: longer ranges save up to 2.5 times as much. Float32 and bfloat16 are alike."""
CPU_CALL_US = 90.0
CPU_MERGE_US = 5.0


class TwoPhaseAttention(SdpaAttention):
    """SdpaAttention whose decodes read shared KV once. REQUIRES the same."""

    def __init__(self, layers: Sequence[LayerKV], partial: PartialAttention | None = None) -> None:
        """`partial`: None for that of the device, see `torch_partial`."""
        super().__init__(layers)
        self._partial = partial or torch_partial(layers[0])
        self._plan: TwoPhasePlan | None = None
        self._planned: AttentionMetadata | None = None

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        plan = self._plan_for(metadata)
        layer = self.layers[layer_idx]
        if plan is None or not plan.allows(layer, options):
            return super().forward(layer_idx, query, key, value, options, metadata)
        store_kv(layer, key, value, metadata)
        num_heads, num_tokens, head_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, head_dim)
        output[plan.rows] = attend(self._partial, plan, layer, query.transpose(0, 1), options)
        self.attend_segments(layer, query, output, plan.others, options, metadata)
        return output

    @property
    def sharing_cost(self) -> SharingCost:
        return torch_cost(self.layers[0])

    def _plan_for(self, metadata: AttentionMetadata) -> TwoPhasePlan | None:
        """Made once per step, for all layers; None: nothing is shared."""
        if metadata is not self._planned:
            self._plan = TwoPhasePlan.build(metadata)
            self._planned = metadata
        return self._plan


@dataclass(frozen=True, slots=True)
class RangeCall:
    """One call of the chunk-first phase."""

    shared: SharedRange
    rows: Rows
    """Its members' rows in the flat batch."""
    positions: Rows
    """Its members' positions among the plan's decodes."""


@dataclass(frozen=True, slots=True)
class TwoPhasePlan:
    """What one step computes in two phases: `decodes`, and all calls for them."""

    decodes: Sequence[Segment]
    covered: Sequence[int]
    """The sequence-first phase of each decode starts at this token."""
    calls: Sequence[RangeCall]
    rows: Rows
    """The decodes' rows in the flat batch."""
    others: Sequence[int]
    """Indices of all other segments."""
    num_tokens: int
    """Of the longest decode."""

    @classmethod
    def build(
        cls, metadata: AttentionMetadata, *, all_decodes: bool = False
    ) -> TwoPhasePlan | None:
        """None if no two decodes share. all_decodes: with those that share nothing, covered up to
        token 0."""
        ranges = []
        for shared in metadata.shared:
            members = tuple(i for i in shared.members if i < metadata.num_decodes)
            if len(members) > 1:
                ranges.append(SharedRange(shared.slot, shared.start, shared.end, members))
        if not ranges:
            return None
        covered = dict.fromkeys(range(metadata.num_decodes if all_decodes else 0), 0)
        for shared in ranges:
            covered.update(dict.fromkeys(shared.members, shared.end))
        indices = sorted(covered)
        position_of = {index: position for position, index in enumerate(indices)}
        segments, device = metadata.segments, metadata.decode_slots.device
        calls = [
            RangeCall(
                shared,
                index_rows([segments[i].row for i in shared.members], device),
                index_rows([position_of[i] for i in shared.members], device),
            )
            for shared in ranges
        ]
        return cls(
            [segments[i] for i in indices],
            [covered[i] for i in indices],
            calls,
            index_rows([segments[i].row for i in indices], device),
            [i for i in range(len(segments)) if i not in covered],
            max(segments[i].end for i in indices),
        )

    def allows(self, layer: LayerKV, options: AttentionOptions) -> bool:
        """Whether a layer with these options is plain attention for all decodes of the plan."""
        if options.softcap is not None or options.sinks is not None:
            return False
        if layer.k.shape[-1] != layer.v.shape[-1]:
            return False
        return not options.hides_any(self.num_tokens)


class PartialAttention(Protocol):
    """The two kinds of calls. Outputs are any float dtype, log-sum-exps natural and float32."""

    def shared(
        self, layer: LayerKV, shared: SharedRange, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunk-first: `query` [members, num_heads, dim] over a shared range, unmasked.

        Returns [members, num_heads, dim] and [members, num_heads].
        """

    def suffixes(
        self, layer: LayerKV, plan: TwoPhasePlan, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence-first: each decode of the plan over its tokens from `covered` on.

        query: [num_tokens, num_heads, dim], the flat batch. Returns [decodes, num_heads, dim] and
        [decodes, num_heads].
        """


def attend(
    partial: PartialAttention,
    plan: TwoPhasePlan,
    layer: LayerKV,
    query: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Both phases. query: [num_tokens, num_heads, dim]. Returns [decodes, num_heads, dim].

    REQUIRES: plan.allows(layer, options).
    """
    output, lse = partial.suffixes(layer, plan, query, options.scaling)
    output = output.float()
    for call in plan.calls:
        part = partial.shared(layer, call.shared, query[call.rows], options.scaling)
        merge_partial(output, lse, call.positions, *part)
    return output.to(query.dtype)


def merge_partial(
    output: torch.Tensor,
    lse: torch.Tensor,
    positions: Rows,
    part: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merge partial results into `output` and `lse` at `positions`, in place (online softmax).

    output: [n, ..., dim], lse: [n, ...], float32; part and part_lse: the same for the positions.
    With L = log(exp(lse) + exp(part_lse)), the attention over both sets of keys is
    exp(lse - L) * output + exp(part_lse - L) * part, and exp(part_lse - L) is a logistic function.
    """
    old, old_lse = output[positions], lse[positions]
    weight = torch.sigmoid(part_lse - old_lse)[..., None]
    output[positions] = torch.lerp(old, part.float(), weight)
    lse[positions] = torch.logaddexp(old_lse, part_lse)


PartialKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float | None], tuple[torch.Tensor, torch.Tensor]
]
"""(query [1, heads, rows, dim], key and value [1, heads, keys, dim], scaling): unmasked attention.

Returns the output [1, heads, rows, dim] and the natural log-sum-exp of the scores
[1, heads, rows] float32. Key and value are strided views that must not be copied.
"""


class TorchPartial:
    """By a kernel of torch, one call a range and one a suffix.

    The query heads of a KV head become rows, as in SdpaAttention.
    """

    def __init__(self, kernel: PartialKernel) -> None:
        self._kernel = kernel

    def shared(
        self, layer: LayerKV, shared: SharedRange, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_members, num_heads, head_dim = query.shape
        num_kv_heads = layer.k.shape[2]
        q = query.view(num_members, num_kv_heads, -1, head_dim).transpose(0, 1)
        k, v = head_views(layer, shared.slot, shared.start, shared.end)
        output, lse = self._kernel(q.flatten(1, 2)[None], k, v, scaling)
        output = output.view(num_kv_heads, num_members, -1, head_dim).transpose(0, 1)
        lse = lse.view(num_kv_heads, num_members, -1).transpose(0, 1)
        return output.flatten(1, 2), lse.reshape(num_members, num_heads)

    def suffixes(
        self, layer: LayerKV, plan: TwoPhasePlan, query: torch.Tensor, scaling: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, num_heads, head_dim = query.shape
        num_kv_heads = layer.k.shape[2]
        outputs, lses = [], []
        for s, start in zip(plan.decodes, plan.covered, strict=True):
            q = query[s.row].view(1, num_kv_heads, -1, head_dim)
            output, lse = self._kernel(q, *head_views(layer, s.slot, start, s.end), scaling)
            outputs.append(output)
            lses.append(lse)
        return (
            torch.cat(outputs).reshape(-1, num_heads, head_dim),
            torch.cat(lses).reshape(-1, num_heads),
        )


def torch_partial(layer: LayerKV) -> TorchPartial:
    """By the kernel of torch that returns log-sum-exp for this arena."""
    if layer.k.device.type != "cuda":
        return TorchPartial(_cpu_flash)
    halves = (torch.float16, torch.bfloat16)
    return TorchPartial(_cuda_flash if layer.k.dtype in halves else _cuda_efficient)


def _cpu_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # `.default` spares the search for an overload, 1 us per call.
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, scale=scaling
    )
    return output, lse


def _cuda_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    result = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query, key, value, scale=scaling
    )
    return result[0], result[1]


def _cuda_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    result = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        query, key, value, None, True, scale=scaling
    )
    return result[0], result[1][..., : query.shape[2]]  # rows of the log-sum-exp are padded


def torch_cost(layer: LayerKV) -> SharingCost:
    """By torch's kernels; on CUDA, where nothing has been measured yet, the CPU's as well."""
    num_elements = layer.k.shape[2] * (layer.k.shape[3] + layer.v.shape[3])
    element_bytes = layer.k.element_size()
    return SharingCost(
        token_bytes=num_elements * element_bytes,
        bytes_per_us=CPU_ELEMENTS_PER_US * element_bytes,
        call_us=CPU_CALL_US,
        merge_us=CPU_MERGE_US,
    )


def index_rows(rows: list[int], device: torch.device) -> Rows:
    """A slice where it can be: then gathering makes a view, and merging is in place."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return to_device(rows, torch.int64, device)
