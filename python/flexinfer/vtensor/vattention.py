"""vAttention's programming interface (Prabhu et al., 2024, Table 3 and Algorithm 1) on vTensors.

A serving loop written for vAttention runs on this module: it owns the requests, an attention kernel
that knows nothing of paging owns the computation, and between them stands one call per step::

    kv_cache = vattention.init_kvcache(num_layers, num_kv_heads, head_dim, L, B, "float16")
    reqid = vattention.alloc_reqid()
    while vattention.step(seq_lens) == -1:   # seq_lens[reqid]: tokens of that request, 0: inactive
        ...                                  # preempt a request
    model(kv_cache, seq_lens)                # reads and writes kv_cache[layer][reqid, :seq_len]
    vattention.free_reqid(reqid)

The module's functions work on one cache for the process, as the paper's do; :class:`VAttention` is
the same as an object. A ``reqid`` is a slot of the manager, a page group is a chunk.

Deferred reclamation (section 6.1.2): what a freed request had mapped stays mapped, and the next
``alloc_reqid`` gets it. It is taken away only when ``step`` finds memory short. Other than in the
paper, pages that change hands are zeroed first, so that no request sees another's KV; switch that
off with ``scrub="off"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from flexinfer.errors import OutOfMemoryError, ReleasedError
from flexinfer.runtime.units import parse_bytes
from flexinfer.vtensor.handle import VTensor
from flexinfer.vtensor.manager import VTensorManager
from flexinfer.vtensor.settings import HUGE_PAGE_BYTES, choose_layers_per_plane
from flexinfer.vtensor.spec import KVSpec

__all__ = [
    "VAttention",
    "alloc_reqid",
    "cleanup",
    "free_reqid",
    "init_kvcache",
    "num_free_kvblocks",
    "step",
    "step_async",
    "vtensor",
]


class VAttention:
    """A KV cache of ``max_batch_size`` (B) requests of up to ``max_context_len`` (L) tokens each.

    Args:
        dtype: ``"float32"``, ``"float16"``, ``"bfloat16"``, or the torch dtype of that name.
        device: as for :class:`VTensorManager`.
        page_group_size: bytes mapped at a time, a number or text such as ``"64KiB"``; None: the
            manager's default, 2 MiB or less.
        layers_per_plane: layers whose K and V lie side by side; 1 is the paper's layout, a tensor
            of its own for K and for V of each layer. None: 1, or the fewest with which a page group
            holds at most 256 tokens, since short requests hold many times what they need else. The
            tensors of ``kv_cache`` have the same shapes, with other strides.
        memory_budget: bound on physical bytes; None: half of the memory that is available.
        deferred_reclamation: keep freed requests mapped for the next one.
        scrub: as for :class:`VTensorManager`.

    Attributes:
        manager: the manager below, for all that this interface has no word for.
        kv_cache: K of all layers, then V of all layers, each ``[B, L, num_kv_heads, head_dim]``.

    Thread-safety: that of the manager for ``step_async``; the rest belongs to one thread.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_context_len: int,
        max_batch_size: int,
        dtype: Any,
        device: str = "cpu",
        *,
        page_group_size: int | str | None = None,
        layers_per_plane: int | None = None,
        memory_budget: int | str | None = None,
        deferred_reclamation: bool = True,
        scrub: Literal["owner", "tenant", "off"] = "owner",
    ) -> None:
        spec = KVSpec(num_layers, num_kv_heads, head_dim, dtype, max_context_len, layers_per_plane)
        if layers_per_plane is None:
            page_bytes = parse_bytes(page_group_size or HUGE_PAGE_BYTES, "page_group_size")
            spec = replace(spec, layers_per_plane=choose_layers_per_plane(spec, page_bytes))
        self.manager = VTensorManager(
            spec,
            device,
            max_requests=max_batch_size,
            memory_budget=memory_budget,
            chunk_bytes=page_group_size,
            park=deferred_reclamation,
            scrub=scrub,
        )
        self._requests: dict[int, VTensor] = {}
        self.kv_cache: list[Any] = []
        if device.startswith("sim"):
            return  # no memory: nothing to look at
        layers = range(num_layers)
        self.kv_cache = [self.manager.k(layer) for layer in layers]
        self.kv_cache += [self.manager.v(layer) for layer in layers]

    def alloc_reqid(self, tokens: Any = None, *, max_cached_tokens: int | None = None) -> int:
        """An unused reqid, from now on active; one that is still mapped comes first.

        With ``tokens`` (token ids: a list, or an int32 buffer) it shares the longest prefix of them
        that was recorded by ``vtensor(reqid).record_prefix(tokens)``, at most ``max_cached_tokens``
        of it: ``vtensor(reqid).num_cached_tokens`` tokens need not be computed. Raises
        OutOfMemoryError when all B are active.
        """
        # Expecting the longest request finds the parked slot with the most memory behind it.
        request = self.manager.try_create(
            tokens,
            max_cached_tokens=max_cached_tokens,
            expected_tokens=self.manager.spec.max_seq_len,
            wait=True,
        )
        if request is None:
            raise OutOfMemoryError(f"all {self.manager.max_requests} reqids are active; free one")
        self._requests[request.slot] = request
        return request.slot

    def vtensor(self, reqid: int) -> VTensor:
        """The vTensor of an active request, to record, fork or inspect; ``free_reqid`` releases it.

        Raises LookupError for a reqid that is not active.
        """
        return self._request(reqid)

    def free_reqid(self, reqid: int) -> None:
        """The request is finished. Raises LookupError for a reqid that is not active."""
        self._request(reqid)
        self._requests.pop(reqid).release()

    def step(self, seq_lens: Sequence[int]) -> int:
        """Back every request up to its length in ``seq_lens`` (of length B, 0 for inactive ones).

        Returns 0, or -1 when memory is short; then nothing has changed. Raises ValueError for a
        wrong number of lengths, LookupError for a length of a reqid that is not active.
        """
        requests, lengths = self._needs(seq_lens)
        if self.manager.try_extend(requests, lengths):
            return 0
        return 0 if self._step_with_adopted_memory(requests, lengths) else -1

    def _step_with_adopted_memory(self, requests: list[VTensor], lengths: list[int]) -> bool:
        """Grows those in need from what others adopted with their reqid and do not need.

        The manager takes nothing from a vTensor that it is asked to extend, so the others are
        declared first, which maps nothing, and left out.
        """
        infos = [request.info() for request in requests]
        wanted = list(zip(requests, lengths, infos, strict=True))
        fits = [(r, n, info.num_tokens) for r, n, info in wanted if info.mapped_tokens >= n]
        grows = [(r, n) for r, n, info in wanted if info.mapped_tokens < n]
        if not fits or not self.manager.try_extend([f[0] for f in fits], [f[1] for f in fits]):
            return False
        if self.manager.try_extend([g[0] for g in grows], [g[1] for g in grows]):
            return True
        for request, num_tokens, declared in fits:
            if declared < num_tokens:
                request.truncate(declared)
        return False

    def step_async(self, seq_lens: Sequence[int]) -> None:
        """Begin to back these lengths in the background, while the model computes.

        ``step`` with them is then cheap. Shortage is no error here: ``step`` will tell.
        """
        self.manager.pre_extend(*self._needs(seq_lens))

    def num_free_kvblocks(self) -> int:
        """Page groups that each of the 2 x num_layers tensors can still have."""
        row_bytes = self.manager.chunk_bytes * self.manager.spec.row_chunks
        return self.manager.available_bytes // row_bytes

    def cleanup(self) -> None:
        """Give everything back. The tensors must not be used any more."""
        self._requests.clear()
        self.kv_cache = []
        self.manager.close()

    def _request(self, reqid: int) -> VTensor:
        try:
            return self._requests[reqid]
        except KeyError:
            raise LookupError(f"reqid {reqid} is not active") from None

    def _needs(self, seq_lens: Sequence[int]) -> tuple[list[VTensor], list[int]]:
        if len(seq_lens) != self.manager.max_requests:
            raise ValueError(
                f"seq_lens has {len(seq_lens)} lengths, but max_batch_size is "
                f"{self.manager.max_requests}"
            )
        for reqid, length in enumerate(seq_lens):
            if not 0 <= length <= self.manager.spec.max_seq_len:
                raise ValueError(
                    f"seq_lens[{reqid}] = {length} is not between 0 and max_context_len "
                    f"{self.manager.spec.max_seq_len}"
                )
        reqids = [reqid for reqid, length in enumerate(seq_lens) if length > 0]
        return [self._request(reqid) for reqid in reqids], [seq_lens[reqid] for reqid in reqids]


# ------------------------------------------------------------------ the paper's one cache a process

_cache: VAttention | None = None


def init_kvcache(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    max_context_len: int,
    max_batch_size: int,
    dtype: Any,
    device: str = "cpu",
    **options: Any,
) -> list[Any]:
    """Make the cache and return its tensors; arguments as for :class:`VAttention`.

    Raises ValueError while there is one already: :func:`cleanup` comes first.
    """
    global _cache
    if _cache is not None:
        raise ValueError("there is a KV cache already; call cleanup() first")
    _cache = VAttention(
        num_layers,
        num_kv_heads,
        head_dim,
        max_context_len,
        max_batch_size,
        dtype,
        device,
        **options,
    )
    return _cache.kv_cache


def _the_cache() -> VAttention:
    if _cache is None:
        raise ReleasedError("there is no KV cache; call init_kvcache() first")
    return _cache


def alloc_reqid(tokens: Any = None, *, max_cached_tokens: int | None = None) -> int:
    """See :meth:`VAttention.alloc_reqid`."""
    return _the_cache().alloc_reqid(tokens, max_cached_tokens=max_cached_tokens)


def vtensor(reqid: int) -> VTensor:
    """See :meth:`VAttention.vtensor`."""
    return _the_cache().vtensor(reqid)


def free_reqid(reqid: int) -> None:
    """See :meth:`VAttention.free_reqid`."""
    _the_cache().free_reqid(reqid)


def step(seq_lens: Sequence[int]) -> int:
    """See :meth:`VAttention.step`."""
    return _the_cache().step(seq_lens)


def step_async(seq_lens: Sequence[int]) -> None:
    """See :meth:`VAttention.step_async`."""
    _the_cache().step_async(seq_lens)


def num_free_kvblocks() -> int:
    """See :meth:`VAttention.num_free_kvblocks`."""
    return _the_cache().num_free_kvblocks()


def cleanup() -> None:
    """Give everything back. Without a cache: nothing."""
    global _cache
    if _cache is not None:
        _cache.cleanup()
        _cache = None
