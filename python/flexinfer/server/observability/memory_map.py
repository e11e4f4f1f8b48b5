"""MemoryMap: the manager's snapshot as JSON, cheap enough to be polled (docs/server.md).

At most every `MIN_INTERVAL_S`, however many ask, the engine's thread takes a snapshot between two
steps, with the ids of its requests, so that both are of one moment (3-8 ms for 48,000 chunks,
measured on the sim driver). It is turned to JSON in another thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.server.observability.prefix_names import PrefixNames
from flexinfer.vtensor import NO_CHUNK, Snapshot, VTensorManager

MIN_INTERVAL_S = 0.1
DEFAULT_MAX_ROWS = 4096


@dataclass(frozen=True)
class Pool:
    """A manager's part of the KV memory, and whose it is."""

    manager: VTensorManager
    snapshot: Snapshot
    request_of: dict[int, str]
    """vTensor id -> request id."""
    state_of: dict[int, str]
    """The same of recurrent states."""


@dataclass(frozen=True)
class Moment:
    """What only the engine's thread can tell, between two steps."""

    pool: Pool
    draft_pool: Pool | None
    """The draft model's."""
    engine: dict[str, Any]


@dataclass(frozen=True)
class RenderedMap:
    body: bytes
    etag: str

    def among(self, replica: str, replicas: Sequence[str]) -> RenderedMap:
        """The same, naming whose map it is, and all replicas that there are."""
        head = json.dumps({"replica": replica, "replicas": replicas})[:-1].encode()
        tag = hashlib.sha256(head + self.etag.encode()).hexdigest()[:32]
        return RenderedMap(head + b", " + self.body[1:], f'"{tag}"')


class MemoryMap:
    """For one event loop."""

    def __init__(self, llm: AsyncLLM, model: str, *, shows_salted: bool) -> None:
        """`shows_salted`: its readers may see the words of salted prefixes, too."""
        self._llm = llm
        self._model = model
        self._names = PrefixNames(llm.tokenizer, shows_salted=shows_salted)
        self._lock = asyncio.Lock()
        self._made: dict[int, tuple[float, RenderedMap]] = {}
        self._last_content = b""
        self._sequence = 0

    async def render(self, max_rows: int = DEFAULT_MAX_ROWS) -> RenderedMap:
        """The map of now, or of a moment ago."""
        async with self._lock:
            made_at, rendered = self._made.get(max_rows, (float("-inf"), None))
            if rendered is None or time.monotonic() - made_at >= MIN_INTERVAL_S:
                self._made = made = {}
                moment = await self._llm.call(_moment)
                content = await asyncio.to_thread(_content, moment, max_rows, self._names)
                rendered = self._number(content)
                made[max_rows] = (time.monotonic(), rendered)  # unless outdated meanwhile
            return rendered

    def outdate(self) -> None:
        """Something was changed on purpose, and its author is to see it at once."""
        self._made = {}

    def _number(self, content: bytes) -> RenderedMap:
        """The same content keeps its number."""
        if content != self._last_content:
            self._sequence += 1
            self._last_content = content
        head = {
            "object": "memory_map",
            "sequence": self._sequence,
            "time": round(time.time(), 3),
            "model": self._model,
        }
        body = json.dumps(head, separators=(",", ":"))[:-1].encode() + b"," + content[1:]
        return RenderedMap(body, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _moment(engine: LLMEngine) -> Moment:
    scheduler = engine.scheduler
    steps = engine.step_totals
    requests = [(request, request.request_id) for request in scheduler.requests]
    draft_pool = None
    if (draft := engine.draft_model) is not None:
        held = {vtensor.id: request.request_id for request, vtensor in draft.vtensors()}
        draft_pool = Pool(draft.manager, draft.manager.snapshot(), held, {})
    return Moment(
        Pool(
            engine.manager,
            engine.manager.snapshot(),
            {one.vtensor.id: name for one, name in requests if one.vtensor is not None},
            {
                state.id: name
                for one, name in requests
                for state in (one.state, one.next_state)
                if state is not None
            },
        ),
        draft_pool,
        {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_swapped": len(scheduler.swapped),
            "is_sleeping": engine.is_sleeping(),
            "num_steps": steps.num_steps,
        },
    )


def _content(moment: Moment, max_rows: int, names: PrefixNames) -> bytes:
    """All but the head, as a JSON object."""
    content = _pool(moment.pool, max_rows, names)
    content["engine"] = moment.engine
    draft = moment.draft_pool
    content["draft_model"] = None if draft is None else _pool(draft, max_rows, names)
    return json.dumps(content, separators=(",", ":")).encode()


def _pool(pool: Pool, max_rows: int, names: PrefixNames) -> dict[str, Any]:
    manager, snapshot = pool.manager, pool.snapshot
    stats = manager.stats()
    retentions = manager.spec.retentions()
    rows = _Rows(snapshot.num_planes, [each.first_chunk for each in retentions])
    vtensors, num_left = _vtensors(pool, max_rows, rows)
    prefixes = _prefixes(snapshot, names, rows)
    shown = {chunk for one in (*vtensors, *prefixes) for chunk in one["chunks"]}
    shown.update(
        chunk
        for one in (*vtensors, *prefixes)
        for row in one.get("groups", ())
        for chunk in row
        if chunk is not None
    )
    return {
        "chunk_bytes": snapshot.chunk_bytes,
        "num_planes": snapshot.num_planes,
        "groups": [
            {
                "window": each.window,
                "num_layers": each.num_layers,
                "row_bytes": each.num_chunks * snapshot.chunk_bytes,
            }
            for each in retentions
        ],
        "row_tokens": round(snapshot.chunk_bytes / manager.spec.plane_token_bytes, 2),
        "truncated": num_left < 0,
        "stats": stats.as_dict(),
        "vtensors": vtensors,
        "chunks": _chunks(snapshot, shown),
        "prefixes": prefixes,
    }


@dataclass(frozen=True)
class _Rows:
    """How page tables are told: by group of layers that keep the same tokens."""

    num_planes: int
    columns: list[int]
    """Of each group, the first."""

    def of(self, table: list[int], max_rows: int | None = None) -> dict[str, Any]:
        """`chunks` of the first group; and where there are several, or a window, `groups`, with
        None for a row that was given back."""
        groups = [
            [None if chunk == NO_CHUNK else chunk for chunk in table[column :: self.num_planes]]
            for column in self.columns
        ]
        groups = [row[:max_rows] for row in groups]
        told: dict[str, Any] = {"chunks": [chunk for chunk in groups[0] if chunk is not None]}
        return told | {"groups": groups} if len(groups) > 1 or NO_CHUNK in table else told


def _vtensors(pool: Pool, max_rows: int, rows: _Rows) -> tuple[list[dict[str, Any]], int]:
    """Slots with their chunks, and how many rows more could have been shown."""
    out = []
    num_planes = pool.snapshot.num_planes
    for info in pool.snapshot.vtensors:
        out.append(
            {
                "id": info.id,
                "slot": info.slot,
                "state": info.state,
                "request_id": pool.request_of.get(info.id) if info.id else None,
                "state_of": pool.state_of.get(info.id) if info.id else None,
                "num_tokens": info.num_tokens,
                "num_cached_tokens": info.num_cached_tokens,
                "num_cut_tokens": info.num_cut_tokens,
                "cut_by_window": info.cut_by_window or None,
                "mapped_tokens": info.mapped_tokens,
                "mapped_bytes": info.mapped_bytes,
                "chunks_aliased": info.chunks_aliased,
                "chunks_copied": info.chunks_copied,
                "rows_given_back": info.table[num_planes - 1 :: num_planes].count(NO_CHUNK),
                **rows.of(info.table, max(0, max_rows)),
            }
        )
        max_rows -= len(info.table) // num_planes
    return out, max_rows


def _chunks(snapshot: Snapshot, shown: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": info.id,
            "generation": info.generation,
            "refs": info.refs,
            "recorded": info.recorded,
            "pinned": info.pinned,
            "appender": info.appender,
            "sharers": info.sharers,
        }
        for info in snapshot.chunks
        if info.id in shown
    ]


def _prefixes(snapshot: Snapshot, names: PrefixNames, rows: _Rows) -> list[dict[str, Any]]:
    return [
        {
            "parent": info.parent,
            "start_tokens": info.start_tokens,
            "num_tokens": info.num_tokens,
            "last_used": info.last_used,
            **rows.of(info.chunks),
            "text": names.of(info.first_tokens, info.num_tokens, info.cache_salt),
            "tenant": _tenant(info.cache_salt),
            "pinned_by": info.pinned_by,
        }
        for info in snapshot.prefixes
    ]


def _tenant(cache_salt: str) -> str:
    """A digest: the salt itself may be a secret."""
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:8] if cache_salt else ""
