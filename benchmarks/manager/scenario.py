"""What is timed: a manager in a given state, and one operation on it. All token ids are random."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from measure import Series, timed

from flexinfer.vtensor import KVGroup, KVSpec, VTensor, VTensorManager

VOCAB = 32_000
NUM_REQUESTS = 256
NUM_PROMPTS = 1000
PROMPT_TOKENS = 4096
SHARED_TOKENS = 1024
CREATE_TOKENS = 2048
CHUNK_TOKENS = 64
WINDOW = 128


@dataclass(frozen=True)
class Setting:
    """A driver, and a KV shape whose chunks hold CHUNK_TOKENS tokens.

    sim: Llama-3-8B in bfloat16, 8 MiB chunks, no memory. host: two tiny layers, real 4 KiB chunks.
    """

    device: str
    spec: KVSpec
    chunk_bytes: int

    @property
    def name(self) -> str:
        return "host" if self.device == "cpu" else self.device

    @property
    def windowed(self) -> Setting:
        """The same, the second half of its layers with a window: a group of its own."""
        spec, half = self.spec, self.spec.num_layers // 2
        groups = [
            KVGroup(
                tuple(range(first, first + half)),
                spec.num_kv_heads,
                spec.head_dim,
                spec.head_dim,
                spec.dtype,
                window=window,
            )
            for first, window in ((0, None), (half, WINDOW))
        ]
        grouped = KVSpec.of_groups(groups, spec.max_seq_len)
        return Setting(self.device, grouped, self.chunk_bytes)

    @contextmanager
    def manager(self, num_requests: int, num_tokens: int) -> Iterator[VTensorManager]:
        """A manager with room for that many requests and tokens, twice over."""
        budget = 2 * num_tokens * self.spec.bytes_per_token + (64 << 20)
        with VTensorManager(
            self.spec,
            device=self.device,
            max_requests=num_requests,
            memory_budget=budget,
            chunk_bytes=self.chunk_bytes,
        ) as manager:
            yield manager


SETTINGS = {
    "host": Setting("cpu", KVSpec(2, 1, 4, "float32", 2 * PROMPT_TOKENS), 4096),
    "sim": Setting("sim", KVSpec(32, 8, 128, "bfloat16", 2 * PROMPT_TOKENS), 8 << 20),
}


class Scenario:
    """All operations in one setting. Each method returns named series of microseconds."""

    def __init__(self, setting: Setting, rounds: int, num_prompts: int) -> None:
        self._setting = setting
        self._rounds = rounds
        self._num_prompts = num_prompts
        self._rng = random.Random(7)

    def run(self) -> dict[str, Series]:
        """Every operation, one after the other."""
        series = {**self.decode_step(), **self.decode_step_windows()}
        series |= self.decode_step_mapping()
        return {**series, **self.create(), **self.fork(), **self.prefix_cache()}

    def tokens(self, count: int) -> Any:
        return array("i", (self._rng.randrange(VOCAB) for _ in range(count)))

    def decode_step(self) -> dict[str, Series]:
        """One token more for each of 256 requests, whose memory is mapped already.

        What the scheduler calls: try_extend for this step, and pre_extend for the next one.
        """
        extend, pre_extend = Series(), Series()
        with self._setting.manager(NUM_REQUESTS, NUM_REQUESTS * (self._rounds + 128)) as manager:
            vtensors = [manager.create() for _ in range(NUM_REQUESTS)]
            ends = [1 + 4 * (idx % 16) for idx in range(NUM_REQUESTS)]
            manager.extend(vtensors, ends)
            for step in range(self._rounds):
                if step % CHUNK_TOKENS == 0:  # the worker maps ahead, outside of the timing
                    manager.pre_extend(vtensors, [end + CHUNK_TOKENS for end in ends])
                    manager.drain()
                ends = [end + 1 for end in ends]
                mapped = manager.stats().mapped_bytes
                _check(timed(extend, manager, manager.try_extend, vtensors, ends))
                if step % CHUNK_TOKENS != CHUNK_TOKENS - 1:
                    following = [end + 1 for end in ends]
                    timed(pre_extend, manager, manager.pre_extend, vtensors, following)
                _check(manager.stats().mapped_bytes == mapped)
        return {"decode_step_256_us": extend, "pre_extend_256_us": pre_extend}

    def decode_step_windows(self) -> dict[str, Series]:
        """As `decode_step`, with two groups, one of them with a window that moves: try_extend, and
        what the scheduler calls after the step, forget_ids; four windows leave a row in each. The
        worker gives these back, between the steps here."""
        extend, forget = Series(), Series()
        num_tokens = NUM_REQUESTS * (self._rounds + 4 * WINDOW)
        with self._setting.windowed.manager(NUM_REQUESTS, num_tokens) as manager:
            vtensors = [manager.create() for _ in range(NUM_REQUESTS)]
            ids = [vtensor.id for vtensor in vtensors]
            ends = [2 * WINDOW + idx % CHUNK_TOKENS for idx in range(NUM_REQUESTS)]
            manager.extend(vtensors, ends)
            for step in range(self._rounds):
                if step % CHUNK_TOKENS == 0:
                    manager.pre_extend(vtensors, [end + CHUNK_TOKENS for end in ends])
                ends = [end + 1 for end in ends]
                manager.drain()
                _check(timed(extend, manager, manager.try_extend, vtensors, ends))
                timed(forget, manager, manager.forget_ids, ids, ends)
            manager.drain()
            _check(self._rounds < CHUNK_TOKENS or manager.stats().chunks_given_back > 0)
        return {"decode_step_256_windows_us": extend, "forget_256_us": forget}

    def decode_step_mapping(self) -> dict[str, Series]:
        """One token more for each of 256 requests; 16 of them come to the end of a chunk."""
        series = Series()
        with self._setting.manager(NUM_REQUESTS, NUM_REQUESTS * 8 * CHUNK_TOKENS) as manager:
            vtensors = [manager.create() for _ in range(NUM_REQUESTS)]
            # Request i stands i % 16 tokens before the end of a chunk, and moves by one per step.
            ends = [CHUNK_TOKENS - idx % 16 for idx in range(NUM_REQUESTS)]
            manager.extend(vtensors, ends)
            for step in range(min(self._rounds, 6 * 16)):
                ends = [end + 1 for end in ends]
                mapped = manager.stats().mapped_bytes
                _check(timed(series, manager, manager.try_extend, vtensors, ends))
                grown = manager.stats().mapped_bytes - mapped
                _check(grown == NUM_REQUESTS // 16 * self._setting.chunk_bytes)
                if step % 16 == 15:  # all stand in their next chunk: on to its end
                    ends = [end + CHUNK_TOKENS - 16 for end in ends]
                    manager.extend(vtensors, ends)
        return {"decode_step_256_sixteenth_us": series}

    def create(self) -> dict[str, Series]:
        """A new request of 2,048 tokens that matches nothing, and its end.

        Its chunks: fresh from the driver, or those of a parked slot (the steady state).
        """
        fresh, steady, release = Series(), Series(), Series()
        with self._setting.manager(4, 4 * CREATE_TOKENS) as manager:
            for series in (fresh, steady):
                for _ in range(self._rounds):
                    if series is fresh:
                        manager.trim()
                    prompt = self.tokens(CREATE_TOKENS)
                    vtensor = timed(series, manager, _create, manager, prompt)
                    timed(release, manager, vtensor.release)
        return {"create_2048_fresh_us": fresh, "create_2048_us": steady, "release_2048_us": release}

    def fork(self) -> dict[str, Series]:
        """A second vTensor with the contents of one of 2,048 tokens, and its own next token."""
        fork, write = Series(), Series()
        with self._setting.manager(4, 4 * CREATE_TOKENS) as manager:
            parent = _create(manager, self.tokens(CREATE_TOKENS - 1))
            for _ in range(self._rounds):
                child = timed(fork, manager, parent.fork)
                timed(write, manager, child.extend, CREATE_TOKENS)
                child.release()
        return {"fork_us": fork, "fork_copy_on_write_us": write}

    def prefix_cache(self) -> dict[str, Series]:
        """1,000 recorded prompts of 4,096 tokens that share 1,024; matched, aliased, evicted."""
        names = ("record_4096_us", "match_4096_us", "match_4096_list_us", "match_1024_us")
        series = {name: Series() for name in (*names, "create_matched_4096_us", "evict_3072_us")}
        count = SHARED_TOKENS + (self._num_prompts + 2) * (PROMPT_TOKENS - SHARED_TOKENS)
        with self._setting.manager(8, count) as manager:
            shared = self.tokens(SHARED_TOKENS)
            prompts = [shared + self._tail() for _ in range(self._num_prompts)]
            for prompt in prompts:
                vtensor = _create(manager, prompt)
                timed(series["record_4096_us"], manager, vtensor.record_prefix, prompt)
                vtensor.release()
            for _ in range(self._rounds):
                self._match(manager, self._rng.choice(prompts), shared + self._tail(), series)
            num_bytes = (PROMPT_TOKENS - SHARED_TOKENS) * self._setting.spec.bytes_per_token
            for _ in range(min(self._rounds, self._num_prompts // 2)):
                timed(series["evict_3072_us"], manager, manager.evict, num_bytes)
        return series

    def _tail(self) -> Any:
        return self.tokens(PROMPT_TOKENS - SHARED_TOKENS)

    def _match(
        self, manager: VTensorManager, known: Any, half_known: Any, series: dict[str, Series]
    ) -> None:
        as_list = known.tolist()
        match = manager.match_prefix
        _check(timed(series["match_4096_us"], manager, match, known) == PROMPT_TOKENS)
        _check(timed(series["match_4096_list_us"], manager, match, as_list) == PROMPT_TOKENS)
        _check(timed(series["match_1024_us"], manager, match, half_known) >= SHARED_TOKENS)
        timed(series["create_matched_4096_us"], manager, manager.create, known).release()


def _create(manager: VTensorManager, prompt: Any) -> VTensor:
    vtensor = manager.create(prompt)
    vtensor.extend(len(prompt))
    return vtensor


def _check(held: bool) -> None:
    if not held:
        raise RuntimeError("the scenario did not do what it says it measures")
