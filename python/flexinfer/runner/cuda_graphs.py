"""DecodeGraphs: steps of decodes as CUDA graphs, captured per batch size, replayed unpatched.

A graph holds addresses. Those of paged KV change with every block table; here a request's KV stays
where it is from first to last token, and so does the arena. What changes from step to step are four
integers per request, and they are read from buffers that stay where they are too:

    step:  | ids | positions | slots |  copied to  | static buffers | -> replay -> logits
    batch of 5 in a graph of 8:  r0 r1 r2 r3 r4 r2 r2 r2

Padding rows repeat a row of the batch, that of the shortest request: they write the same KV to the
same place, and need no memory of their own.

A kernel splits its work by the longest length it is told, which a graph fixes. Small batches, where
splits matter, therefore have graphs for several bounds of the length.

Graphs know nothing of ranges that requests share: which there are, and of how many, changes from
step to step, and so would the kernels. A step whose ranges save more than the graph does is
computed eagerly, in two phases; all others are replayed, and read shared KV once per request.

Not thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from flexinfer.attention.base import AttentionMetadata
from flexinfer.attention.segments import Segment
from flexinfer.attention.sharing_cost import SharingCost, total_gain_us
from flexinfer.runner.inputs import StepInputs

logger = logging.getLogger(__name__)

SPLIT_BATCH_SIZE = 16
"""Up to here a batch alone does not fill a GPU, and kernels split the keys."""
LENGTH_BOUNDS = (4096, 32768)
"""Bounds of the length for such batches, besides the longest that there may be."""
GRAPH_GAIN_US = 500.0
"""What a graph saves in one layer of a step: at most all of its launches from Python, some 50 of
10 us. An estimate, not measured; less where the GPU is the slower side, so that sharing is chosen
too rarely rather than too often."""

Forward = Callable[[StepInputs], torch.Tensor]


class Recorder(Protocol):
    """Makes a function of static tensors repeatable."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What does again what the function does, on the same tensors. Calls it once beforehand,
        unrecorded."""
        ...


class CudaRecorder:
    """CUDA's stream capture. All graphs share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()  # libraries make their handles and workspaces now, outside of the graph
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: the manager's worker may go on creating and mapping chunks meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeGraphs:
    """
    Invariants:
    1. Graphs read nothing of a step but `_static` and the arena, and leave its logits in `_logits`:
       their own go back to the pool that they share, or each would keep some for itself (1.1 GB in
       all for 256 sequences and 128K words in bfloat16).
    2. `_graphs` has all of `sizes`, or is empty: then every step is computed eagerly.
    """

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        sizes: Sequence[int],
        max_seq_len: int,
        device: torch.device,
        sharing_cost: SharingCost | None = None,
    ) -> None:
        """sharing_cost: the backend's graph_sharing_cost."""
        self._forward = forward
        self._sharing_cost = sharing_cost
        self._recorder = recorder
        self.sizes = sorted(set(sizes))
        self._max_seq_len = max_seq_len
        self._static = torch.zeros(3, self.sizes[-1], dtype=torch.int64, device=device)
        self._rows = torch.arange(self.sizes[-1], dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None
        """[largest size, vocab_size], of the last replay; made by the first forward."""
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, slot: int) -> bool:
        """Record all graphs; largest first, so that the others fit into its memory.

        REQUIRES: the arena backs token 0 of `slot`, whose KV is overwritten. False: it failed, and
        a warning says why; steps are computed eagerly then.
        """
        self._static[:2] = 0
        self._static[2] = slot
        try:
            for size in reversed(self.sizes):
                for bound in self._bounds(size):
                    compute = partial(self._compute, size, bound)
                    self._graphs[size, bound] = self._recorder.record(compute)
        except Exception as error:
            self._graphs.clear()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning(
                "no CUDA graphs: this model cannot be captured (%s); decoding is slower at small "
                "batches. enforce_eager=True makes this the choice, without a warning",
                lines[0],
            )
            return False
        return True

    def accepts(self, inputs: StepInputs) -> bool:
        """Whether there is a graph for this step, decodes only and not too many, and sharing is
        not worth more."""
        num_tokens = inputs.token_ids.shape[0]
        return (
            bool(self._graphs)
            and 0 < num_tokens <= self.sizes[-1]
            and inputs.metadata.num_decodes == num_tokens
            and not self._gains_more_by_sharing(inputs.metadata)
        )

    def _gains_more_by_sharing(self, metadata: AttentionMetadata) -> bool:
        if self._sharing_cost is None or not metadata.shared:
            return False
        gain_us = total_gain_us(metadata.shared, metadata.segments, self._sharing_cost)
        return gain_us > GRAPH_GAIN_US

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of the rows that need them. REQUIRES: `accepts(inputs)`."""
        num_tokens = inputs.token_ids.shape[0]
        segments = inputs.metadata.segments
        size = next(size for size in self.sizes if size >= num_tokens)
        longest = max(s.end for s in segments)
        bound = next(bound for bound in self._bounds(size) if bound >= longest)
        ids, positions, slots = self._static
        ids[:num_tokens].copy_(inputs.token_ids)
        positions[:num_tokens].copy_(inputs.positions)
        slots[:num_tokens].copy_(inputs.metadata.decode_slots)
        if num_tokens < size:
            shortest = min(range(num_tokens), key=lambda row: segments[row].end)
            self._static[:, num_tokens:size] = self._static[:, shortest : shortest + 1].clone()
        self._graphs[size, bound]()
        assert self._logits is not None
        return self._logits.index_select(0, inputs.logits_rows)

    def _compute(self, size: int, bound: int) -> None:
        # The metadata is new at each call: backends keep what they derive from the last one, and a
        # graph must derive it itself.
        logits = self._forward(self._inputs(size, bound))
        if self._logits is None:  # outside of a graph: recorders call it once before they record
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
        self._logits[:size].copy_(logits)

    def _inputs(self, size: int, bound: int) -> StepInputs:
        ids, positions, slots = self._static[:, :size]
        return StepInputs(
            token_ids=ids,
            positions=positions,
            logits_rows=self._rows[:size],
            metadata=AttentionMetadata(
                # Bounds for the host; the device reads slots and positions.
                segments=[Segment(0, row, bound - 1, bound) for row in range(size)],
                num_decodes=size,
                decode_slots=slots,
                decode_positions=positions,
            ),
        )

    def _bounds(self, size: int) -> list[int]:
        """Ascending; the last is the longest that there may be."""
        bounds = LENGTH_BOUNDS if size <= SPLIT_BATCH_SIZE else ()
        return [*(bound for bound in bounds if bound < self._max_seq_len), self._max_seq_len]


def choose_sizes(wanted: Sequence[int] | None, max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: those asked for that can occur, or 1, 2, 4, and multiples of 8."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs} if wanted is None else set(wanted)
    return sorted(size for size in sizes if size <= max_num_seqs)
