"""The vAttention interface: the meaning of its calls, and a serving loop written for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexinfer import vattention
from flexinfer.errors import OutOfMemoryError, ReleasedError
from flexinfer.vattention import VAttention

torch = pytest.importorskip("torch")

B, L, LAYERS, HEADS, DIM = 4, 64, 2, 2, 32
PAGE_BYTES = 4096  # 16 tokens of one layer's K
ROW = 2 * LAYERS  # page groups that 16 tokens need


def open_cache(num_rows: int = 16, **options: Any) -> VAttention:
    return VAttention(
        LAYERS,
        HEADS,
        DIM,
        L,
        B,
        torch.float32,
        page_group_size=PAGE_BYTES,
        memory_budget=num_rows * ROW * PAGE_BYTES,
        **options,
    )


@pytest.fixture
def cache() -> Iterator[VAttention]:
    opened = open_cache()
    yield opened
    opened.cleanup()


def test_the_cache_is_k_of_all_layers_then_v_of_all_layers(cache: VAttention) -> None:
    assert len(cache.kv_cache) == 2 * LAYERS
    assert all(tensor.shape == (B, L, HEADS, DIM) for tensor in cache.kv_cache)
    assert all(tensor.dtype == torch.float32 for tensor in cache.kv_cache)


def test_what_is_written_through_the_tensors_stays(cache: VAttention) -> None:
    reqid = cache.alloc_reqid()
    lens = [0] * B
    lens[reqid] = 40
    assert cache.step(lens) == 0
    for i, tensor in enumerate(cache.kv_cache):
        tensor[reqid, :40] = i + 1
    lens[reqid] = 64
    assert cache.step(lens) == 0
    assert [float(tensor[reqid, 39].mean()) for tensor in cache.kv_cache] == [1, 2, 3, 4]


def test_reqids_are_distinct_and_limited(cache: VAttention) -> None:
    assert sorted(cache.alloc_reqid() for _ in range(B)) == list(range(B))
    with pytest.raises(OutOfMemoryError, match="all 4 reqids are active"):
        cache.alloc_reqid()


def test_a_freed_reqid_stays_mapped_and_is_handed_out_first(cache: VAttention) -> None:
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    lens = [0] * B
    lens[first], lens[second] = 16, 64
    assert cache.step(lens) == 0
    cache.free_reqid(second)
    before = cache.manager.stats()
    assert before.parked_bytes == 4 * ROW * PAGE_BYTES
    assert cache.alloc_reqid() == second
    assert cache.step(lens) == 0
    after = cache.manager.stats()
    for kind in ("create", "map", "set_access", "unmap"):
        assert after.driver_calls[kind].calls == before.driver_calls[kind].calls


def test_a_reused_reqid_shows_nothing_of_the_old_request(cache: VAttention) -> None:
    reqid = cache.alloc_reqid()
    lens = [0] * B
    lens[reqid] = 32
    cache.step(lens)
    for tensor in cache.kv_cache:
        tensor[reqid, :32] = 7
    cache.free_reqid(reqid)
    assert cache.alloc_reqid() == reqid
    assert cache.step(lens) == 0
    assert not any(tensor[reqid, :32].any() for tensor in cache.kv_cache)


def test_without_deferred_reclamation_nothing_stays_mapped() -> None:
    cache = open_cache(deferred_reclamation=False)
    reqid = cache.alloc_reqid()
    cache.step([32 if i == reqid else 0 for i in range(B)])
    cache.free_reqid(reqid)
    assert cache.manager.stats().parked_bytes == 0
    cache.cleanup()


def test_step_fails_with_nothing_changed_when_memory_is_short() -> None:
    cache = open_cache(num_rows=4)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    lens = [0] * B
    lens[first], lens[second] = 32, 32
    assert cache.step(lens) == 0
    before = cache.manager.stats()
    lens[first], lens[second] = 48, 48
    assert cache.step(lens) == -1
    after = cache.manager.stats()
    assert (after.mapped_bytes, after.resident_bytes) == (
        before.mapped_bytes,
        before.resident_bytes,
    )
    cache.free_reqid(second)  # preempted
    lens[second] = 0
    assert cache.step(lens) == 0
    cache.manager.check_integrity()
    cache.cleanup()


def test_reclamation_happens_when_memory_is_short() -> None:
    cache = open_cache(num_rows=4)
    reqid = cache.alloc_reqid()
    assert cache.step([64 if i == reqid else 0 for i in range(B)]) == 0
    cache.free_reqid(reqid)
    others = [cache.alloc_reqid(), cache.alloc_reqid()]
    assert cache.step([32 if i in others else 0 for i in range(B)]) == 0
    cache.cleanup()


def test_step_after_step_async_makes_no_driver_call(cache: VAttention) -> None:
    reqid = cache.alloc_reqid()
    lens = [48 if i == reqid else 0 for i in range(B)]
    cache.step_async(lens)
    cache.manager.drain()
    before = cache.manager.stats().driver_calls
    assert cache.step(lens) == 0
    after = cache.manager.stats().driver_calls
    assert {k: c.calls for k, c in after.items()} == {k: c.calls for k, c in before.items()}
    assert after["map"].hidden_us == after["map"].us > 0


def test_free_blocks_count_page_groups_of_each_tensor(cache: VAttention) -> None:
    assert cache.num_free_kvblocks() == 16
    reqid = cache.alloc_reqid()
    cache.step([17 if i == reqid else 0 for i in range(B)])
    assert cache.num_free_kvblocks() == 14
    cache.free_reqid(reqid)
    assert cache.num_free_kvblocks() == 16


def test_a_recorded_prefix_is_shared_with_the_next_reqid(cache: VAttention) -> None:
    tokens = list(range(40))
    first = cache.alloc_reqid(tokens)
    lens = [40 if i == first else 0 for i in range(B)]
    assert cache.step(lens) == 0
    for i, tensor in enumerate(cache.kv_cache):
        tensor[first, :40] = i + 1
    assert cache.vtensor(first).record_prefix(tokens) == 40
    second = cache.alloc_reqid([*tokens[:32], 99], max_cached_tokens=32)
    assert cache.vtensor(second).num_cached_tokens == 32
    assert [float(tensor[second, :32].mean()) for tensor in cache.kv_cache] == [1, 2, 3, 4]
    assert cache.manager.stats().shared_bytes == 2 * ROW * PAGE_BYTES


def test_the_layout_is_chosen_so_that_a_page_group_holds_few_tokens() -> None:
    """64 bytes per token of one layer's K: 64 tokens in 4 KiB, 1,024 in 64 KiB, of one layer."""
    for page, layers in (("4KiB", 1), ("64KiB", 2), ("4MiB", 8)):
        cache = VAttention(
            8, 1, 32, 2048, 2, "float16", page_group_size=page, memory_budget="64MiB"
        )
        assert cache.manager.spec.layers_per_plane == layers
        assert all(tensor.shape == (2, 2048, 1, 32) for tensor in cache.kv_cache)
        cache.cleanup()
    paper = VAttention(8, 1, 32, 64, 2, "float16", "sim", layers_per_plane=1)
    assert paper.manager.spec.num_planes == 16
    paper.cleanup()


@pytest.mark.parametrize(
    ("lens", "error"),
    [([1] * (B + 1), ValueError), ([L + 1, 0, 0, 0], ValueError), ([-1, 0, 0, 0], ValueError)],
)
def test_wrong_lengths_are_refused(
    cache: VAttention, lens: list[int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        cache.step(lens)


def test_a_reqid_that_is_not_active_is_refused(cache: VAttention) -> None:
    with pytest.raises(LookupError, match="reqid 2 is not active"):
        cache.step([0, 0, 1, 0])
    with pytest.raises(LookupError, match="reqid 3 is not active"):
        cache.free_reqid(3)


# ------------------------------------------------------------------- a loop written for vAttention


class Request:
    """Of the page's loop: tokens that grow until there are `num_new` new ones."""

    def __init__(self, prompt: list[int], num_new: int) -> None:
        self.tokens = list(prompt)
        self._num_tokens = len(prompt) + num_new

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) == self._num_tokens


class Model:
    """Stands for a transformer: writes the KV of new tokens and reads all that is before them."""

    def __init__(self) -> None:
        self._previous: set[Request] = set()
        self.num_prefills = 0

    def forward(
        self, kv_cache: list[Any], running: dict[Request, int], seq_lens: list[int]
    ) -> None:
        for request, reqid in running.items():
            end = seq_lens[reqid]
            start = end - 1 if request in self._previous else 0
            self.num_prefills += start == 0
            numbers = torch.tensor(request.tokens[start:], dtype=torch.float32)[:, None, None]
            for i, tensor in enumerate(kv_cache):
                tensor[reqid, start:end] = numbers + i
            seen = [tensor[reqid, :end, 0, 0].sum() - i * end for i, tensor in enumerate(kv_cache)]
            assert all(torch.equal(seen[0], other) for other in seen)
            request.tokens.append(int(seen[0]) % 101)
        self._previous = set(running)


def expected_tokens(prompt: list[int], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(sum(tokens) % 101)
    return tokens


PROMPTS = [list(range(i, i + 5 + 3 * i)) for i in range(8)]


@pytest.mark.parametrize(("num_rows", "preempts"), [(16, False), (5, True)])
def test_the_loop_of_the_documentation_runs(
    num_rows: int, preempts: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of docs/vattention.md, on a cache of the size that the test needs."""
    page = (root / "docs" / "vattention.md").read_text()
    (loop,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    init_kvcache = vattention.init_kvcache

    def small_cache(*_: Any, **__: Any) -> list[Any]:
        options = {"page_group_size": PAGE_BYTES, "memory_budget": num_rows * ROW * PAGE_BYTES}
        return init_kvcache(LAYERS, HEADS, DIM, L, B, torch.float32, **options)

    monkeypatch.setattr(vattention, "init_kvcache", small_cache)
    requests = [Request(prompt, 20) for prompt in PROMPTS]
    model = Model()
    names = {"waiting": list(requests), "running": {}, "model": model, "max_context_len": L, "B": B}
    exec(compile(loop, "vattention.md", "exec"), names)
    assert [request.tokens for request in requests] == [expected_tokens(p, 20) for p in PROMPTS]
    assert (model.num_prefills > len(PROMPTS)) == preempts


def test_the_functions_need_a_cache_and_there_is_one_at_a_time() -> None:
    with pytest.raises(ReleasedError, match="call init_kvcache"):
        vattention.alloc_reqid()
    vattention.init_kvcache(LAYERS, HEADS, DIM, L, B, "float16", memory_budget="1MiB")
    with pytest.raises(ValueError, match="call cleanup"):
        vattention.init_kvcache(LAYERS, HEADS, DIM, L, B, "float16")
    assert vattention.num_free_kvblocks() > 0
    vattention.cleanup()
    vattention.cleanup()
