"""A plain Python model of the manager, which stores every token's KV as numbers, and random
operations on both (hypothesis, stateful).

The KV of a token is a function of the salt, the tokens before it and the layer, as in a real
model: two requests have equal KV at a position exactly when their prefixes are equal. Whatever the
manager aliases, copies, parks, adopts or evicts, each live vTensor must show these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flexinfer.errors import OutOfMemoryError
from flexinfer.vtensor import VTensor, VTensorManager
from helpers import device_param as kv_device
from helpers.modelled_kv import MAX_SEQ_LEN, Setup, common_prefix, kv_of
from helpers.sharing_oracle import check_shared_ranges

SALTS = ["", "tenant"]

# Few distinct tokens, short runs: prefixes meet and part often.
runs = st.lists(st.integers(0, 2), min_size=1, max_size=40)
salts = st.sampled_from(SALTS)


@dataclass
class Modelled:
    """What the model knows of one live vTensor."""

    vtensor: VTensor
    salt: str
    tokens: list[int] = field(default_factory=list)
    is_swapped: bool = False


class ManagerMachine(RuleBasedStateMachine):
    """Random operations; the contents of every live vTensor and all invariants after each."""

    setup: Setup

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Modelled] = []
        self.recorded: dict[str, list[list[int]]] = {salt: [] for salt in SALTS}
        self.computed: dict[str, set[float]] = {salt: set() for salt in SALTS}
        self.may_have_evicted = False
        self.num_evicted = 0

    @initialize()
    def open(self) -> None:
        setup = self.setup
        self.full_budget = setup.budget_chunks * setup.chunk_bytes
        self.swap_space = self.full_budget // 2
        self.manager = VTensorManager(
            setup.spec(),
            max_requests=setup.max_requests,
            memory_budget=self.full_budget,
            chunk_bytes=setup.chunk_bytes,
            park=setup.park,
            alias=setup.alias,
            scrub=setup.scrub,  # type: ignore[arg-type]
            prefix_cache_bytes=None
            if setup.idle_chunks is None
            else setup.idle_chunks * setup.chunk_bytes,
            swap_space=self.swap_space,
            **kv_device.options(),
        )
        self.spec = self.manager.spec  # planes of windows may have got room for more layers

    # ---------------------------------------------------------------------------------- helpers

    @property
    def num_taken_slots(self) -> int:
        return len(self.live)

    @property
    def resident(self) -> list[Modelled]:
        return [model for model in self.live if not model.is_swapped]

    @property
    def swapped(self) -> list[Modelled]:
        return [model for model in self.live if model.is_swapped]

    def pick(self, index: int) -> Modelled:
        return self.resident[index % len(self.resident)]

    def longest_recorded(self, salt: str, tokens: list[int]) -> int:
        return max((common_prefix(tokens, known) for known in self.recorded[salt]), default=0)

    def check_match(self, matched: int, salt: str, tokens: list[int]) -> None:
        longest = self.longest_recorded(salt, tokens)
        assert matched <= longest
        if not (self.may_have_evicted or self.spec.windows):
            assert matched == longest

    def write(self, model: Modelled, start: int) -> None:
        """Writes what a model would compute for the tokens from ``start`` on."""
        numbers = kv_of(model.salt, model.tokens)[start:, None, None]
        self.computed[model.salt].update(numbers.ravel().tolist())
        for layer in range(self.spec.num_layers):
            keys, values = self.views(model, layer)
            keys[start:] = numbers + layer
            if values is not None:
                values[start:] = -numbers - layer

    def views(self, model: Modelled, layer: int) -> tuple[Any, Any]:
        """K and V; as kernels see them where there is no memory to guard what is shared."""
        vtensor, has_values = model.vtensor, self.spec.group_of(layer).value_dim > 0
        try:
            return vtensor.k(layer), vtensor.v(layer) if has_values else None
        except OutOfMemoryError:
            keys = self.manager.k(layer)[vtensor.slot, : vtensor.num_tokens]
            if not has_values:
                return keys, None
            return keys, self.manager.v(layer)[vtensor.slot, : vtensor.num_tokens]

    def append(self, model: Modelled, tokens: list[int]) -> bool:
        """Extends, writes and tells whether there was memory for it."""
        tokens = tokens[: MAX_SEQ_LEN - len(model.tokens)]
        start = len(model.tokens)
        before = self.manager.stats()
        if not model.vtensor.try_extend(start + len(tokens)):
            assert self.manager.stats().recorded_tokens == before.recorded_tokens
            assert model.vtensor.num_tokens == start
            return False
        if self.setup.scrub != "off":
            self.check_new_tokens_show_no_strangers(model, start)
        model.tokens = model.tokens + tokens
        self.write(model, start)
        return True

    def check_new_tokens_show_no_strangers(self, model: Modelled, start: int) -> None:
        """Memory not yet written shows zeros, or what this salt computed: never another's."""
        fresh = np.unique(np.abs(self.views(model, 0)[0][start:].astype(np.float32)))
        assert set(fresh.tolist()) <= {0.0} | self.computed[model.salt]

    # ------------------------------------------------------------------------------------ rules

    @rule(tokens=runs, salt=salts, continues=st.integers(0, 9))
    def create(self, tokens: list[int], salt: str, continues: int) -> None:
        known = self.recorded[salt]
        if known and continues < 8:  # a next turn
            tokens = (known[continues % len(known)] + tokens)[:MAX_SEQ_LEN]
        vtensor = self.manager.try_create(tokens, cache_salt=salt)
        if vtensor is None:
            assert self.num_taken_slots == self.setup.max_requests or not self.setup.alias
            return
        self.check_match(vtensor.num_cached_tokens, salt, tokens)
        model = Modelled(vtensor, salt, tokens[: vtensor.num_cached_tokens])
        self.live.append(model)
        self.append(model, tokens[vtensor.num_cached_tokens :])

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9), tokens=runs)
    def extend(self, index: int, tokens: list[int]) -> None:
        self.append(self.pick(index), tokens)

    @precondition(lambda self: self.resident)
    @rule(token=st.integers(0, 2))
    def decode_step(self, token: int) -> None:
        """One more token for everyone, in one call: all or none."""
        batch = [model for model in self.resident if len(model.tokens) < MAX_SEQ_LEN]
        vtensors = [model.vtensor for model in batch]
        if not self.manager.try_extend(vtensors, [len(model.tokens) + 1 for model in batch]):
            assert all(m.vtensor.num_tokens == len(m.tokens) for m in batch)
            return
        for model in batch:
            model.tokens = [*model.tokens, token]
            self.write(model, len(model.tokens) - 1)

    @precondition(lambda self: self.resident)
    @rule(ahead=st.integers(1, 20), wait=st.booleans())
    def pre_extend(self, ahead: int, wait: bool) -> None:
        lengths = [len(model.tokens) + ahead for model in self.live]
        self.manager.pre_extend([model.vtensor for model in self.live], lengths)
        self.may_have_evicted = True
        if wait:
            self.manager.drain()

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9), share=st.integers(0, 4))
    def record(self, index: int, share: int) -> None:
        model = self.pick(index)
        tokens = model.tokens[: len(model.tokens) * share // 4] if share < 4 else model.tokens
        new = model.vtensor.record_prefix(tokens)
        if not self.may_have_evicted:
            assert new == len(tokens) - self.longest_recorded(model.salt, tokens)
        if tokens:
            self.recorded[model.salt].append(list(tokens))
        matched = self.manager.match_prefix(tokens, model.salt)
        assert matched == len(tokens) or (self.spec.windows and matched < len(tokens))

    @rule(tokens=runs, salt=salts)
    def match(self, tokens: list[int], salt: str) -> None:
        self.check_match(self.manager.match_prefix(tokens, salt), salt, tokens)

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        parent = self.pick(index)
        try:
            child = parent.vtensor.fork()
        except OutOfMemoryError:
            assert self.num_taken_slots == self.setup.max_requests or not self.setup.alias
            return
        self.live.append(Modelled(child, parent.salt, list(parent.tokens)))

    def first_kept(self, model: Modelled, layer: int) -> int:
        """The first token that the next query of a layer reads."""
        window = self.spec.group_of(layer).window
        return 0 if window is None else max(0, len(model.tokens) + 1 - window)

    @precondition(lambda self: self.live and self.spec.windows)
    @rule(share=st.integers(1, 4), wait=st.booleans())
    def forget(self, share: int, wait: bool) -> None:
        lengths = [len(model.tokens) * share // 4 for model in self.live]
        self.manager.forget([model.vtensor for model in self.live], lengths)
        if wait:
            self.manager.drain()

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9), length=st.integers(0, MAX_SEQ_LEN))
    def truncate(self, index: int, length: int) -> None:
        model = self.pick(index)
        kept = length % (len(model.tokens) + 1)
        try:
            model.vtensor.truncate(kept)
        except ValueError:
            assert self.spec.windows
            return
        model.tokens = model.tokens[:kept]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), record=st.booleans())
    def release(self, index: int, record: bool) -> None:
        model = self.live.pop(index % len(self.live))
        if record and model.tokens and not model.is_swapped:
            model.vtensor.record_prefix(model.tokens)
            self.recorded[model.salt].append(list(model.tokens))
        model.vtensor.release()

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9))
    def release_with_a_living_view(self, index: int) -> None:
        """The view shows its data until it dies, whatever others do meanwhile."""
        if len(self.resident) == 1:
            return
        model = self.pick(index)
        self.live.remove(model)
        try:
            view = model.vtensor.k(0)
        except OutOfMemoryError:
            view = kv_of(model.salt, model.tokens)[:, None, None]  # none to be had
        model.vtensor.release()
        self.append(self.resident[0], [0, 1, 2])
        expected = kv_of(model.salt, model.tokens)[:, None, None].astype(view.dtype)
        first = self.first_kept(model, 0)
        assert (view[first:] == expected[first:]).all()

    @precondition(lambda self: self.resident)
    @rule(index=st.integers(0, 9))
    def swap_out(self, index: int) -> None:
        model = self.pick(index)
        before = self.manager.stats().swapped_bytes
        num_bytes = len(model.tokens) * self.spec.bytes_per_token
        model.is_swapped = model.vtensor.try_swap_out()
        assert model.is_swapped or before + num_bytes > self.swap_space
        written = self.manager.stats().swapped_bytes - before  # not what others hold as well
        assert 0 <= written <= num_bytes * model.is_swapped

    @precondition(lambda self: self.swapped)
    @rule(index=st.integers(0, 9), share=st.integers(0, 2))
    def swap_in(self, index: int, share: int) -> None:
        model = self.swapped[index % len(self.swapped)]
        tokens = model.tokens[: len(model.tokens) * share // 2]
        before = self.manager.stats()
        model.is_swapped = not model.vtensor.try_swap_in(tokens)
        if model.is_swapped:
            assert self.manager.stats().swapped_bytes >= before.swapped_bytes  # it was tried
            assert self.manager.stats().recorded_tokens == before.recorded_tokens

    @rule(extended=st.booleans())
    def sleep_and_wake(self, extended: bool) -> None:
        if extended and self.live:  # jobs of the worker are still posted
            self.pre_extend(8, wait=False)
        self.manager.sleep()
        assert self.manager.resident_bytes == 0
        self.manager.check_integrity()
        self.manager.wake()
        assert self.manager.stats().asleep_bytes == 0
        self.manager.drain()  # those that come only now create chunks

    @rule(chunks=st.integers(1, 8))
    def evict(self, chunks: int) -> None:
        freed = self.manager.evict(chunks * self.setup.chunk_bytes)
        self.may_have_evicted = True
        assert freed % self.setup.chunk_bytes == 0

    @rule()
    def trim(self) -> None:
        self.manager.trim()
        stats = self.manager.stats()
        assert stats.free_bytes == 0
        assert stats.parked_bytes == 0

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.drain()
        forgotten = self.manager.stats().recorded_tokens
        assert self.manager.reset_prefix_cache() == forgotten
        self.recorded = {salt: [] for salt in SALTS}
        self.may_have_evicted = False

    @rule(percent=st.integers(10, 100))
    def change_budget(self, percent: int) -> None:
        budget = max(
            self.full_budget * percent // 100, self.spec.row_chunks * self.setup.chunk_bytes
        )
        before = self.manager.memory_budget
        self.may_have_evicted = True
        try:
            self.manager.memory_budget = budget
        except OutOfMemoryError:
            assert self.manager.memory_budget == before

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            stats = self.manager.stats()
            assert stats.resident_bytes <= stats.budget_bytes
            # memory was short: someone's prefixes were taken
            self.may_have_evicted |= stats.chunks_evicted > self.num_evicted
            self.num_evicted = stats.chunks_evicted

    @invariant()
    def contents_are_what_the_model_computed(self) -> None:
        for model in self.live:
            vtensor = model.vtensor
            assert vtensor.num_tokens == len(model.tokens)
            if model.is_swapped:
                continue
            expected = kv_of(model.salt, model.tokens)[:, None, None]
            for layer in range(self.spec.num_layers):
                keys, values = self.views(model, layer)
                read = slice(self.first_kept(model, layer), None)
                assert (keys[read] == (expected + layer)[read].astype(keys.dtype)).all()
                if values is not None:
                    assert (values[read] == (-expected - layer)[read].astype(values.dtype)).all()

    @invariant()
    def shared_ranges_are_what_the_page_tables_say(self) -> None:
        lengths = [len(model.tokens) for model in self.resident]
        lengths = [max(0, length - i % 3) for i, length in enumerate(lengths)]
        vtensors = [model.vtensor for model in self.resident]
        if vtensors and not self.spec.windows:
            check_shared_ranges(self.manager, vtensors, lengths)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, live = self.manager, self.live
        self.live = []
        for model in live:
            model.vtensor.release()
        manager.reset_prefix_cache()
        manager.trim()
        assert manager.stats().resident_bytes == 0
        manager.check_integrity()
        manager.close()
