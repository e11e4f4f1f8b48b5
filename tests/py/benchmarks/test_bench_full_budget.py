"""The paged baseline of benchmarks/full_budget computes what the engine computes, over pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams
from helpers.benchmark_modules import BENCHMARKS, fresh_benchmark_modules
from helpers.tiny_models import CONFIGS

FOLDERS = ("common", "gpu_common", "kernels", "full_budget")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in FOLDERS:
        monkeypatch.syspath_prepend(str(BENCHMARKS / name))
    with fresh_benchmark_modules():
        import engines

        yield engines


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers as tf

    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval()


def prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.choices(range(1, vocab_size), k=40) for _ in range(2)]
    own = [draw.choices(range(1, vocab_size), k=draw.randint(1, 30)) for _ in range(16)]
    return [shared[i % 2] + tokens for i, tokens in enumerate(own)]


def tokens_of(llm: LLM, many: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": one} for one in many], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("page_tokens", [4, 16])
def test_over_pages_the_engine_says_the_same(engines: Any, model: Any, page_tokens: int) -> None:
    """In a budget of so few pages that prefixes are evicted and requests computed again."""
    many = prompts(model.config.vocab_size)
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 5}
    with engines.open_ours(model, **settings, kv_cache_memory_bytes="64MiB") as llm:
        expected = tokens_of(llm, many)
        token_bytes = llm.llm_engine.manager.spec.bytes_per_token
    kernel = engines.PlainPages(torch.device("cpu"))
    settings["kv_cache_memory_bytes"] = 208 * token_bytes
    with engines.open_paged(model, kernel, page_tokens, **settings) as llm:
        assert tokens_of(llm, many) == expected
        assert isinstance(llm.llm_engine.runner.backend, engines.PagedAttention)
        stats, engine = llm.llm_engine.manager.stats(), llm.llm_engine.stats()
        pool = llm.llm_engine.manager.pool
    assert stats.chunks_aliased > 0
    assert stats.chunks_evicted > 0
    assert sum(engine.preemptions["recompute"].values()) > 0
    assert len(pool.free) == 208 // page_tokens


class Uncaptured:
    """A `Recorder` whose graphs are computed anew."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function


def test_over_pages_decodes_are_replayed_at_every_length(
    engines: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = prompts(model.config.vocab_size)[:5]
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 5,
        "kv_cache_memory_bytes": "64MiB",
    }
    with engines.open_ours(model, **settings) as llm:
        expected = tokens_of(llm, many)
    kernel = engines.PlainPages(torch.device("cpu"))
    with engines.open_paged(model, kernel, 16, **settings) as llm:
        runner, vtensor = llm.llm_engine.runner, llm.llm_engine.manager.create()
        monkeypatch.setattr(engines.PagedAttention, "supports_graphs", True)
        runner.capture_graphs(vtensor, Uncaptured(), [1, 2, 4, 5])
        vtensor.release()
        assert runner.graphs is not None
        replayed = []
        real = runner.graphs.run
        monkeypatch.setattr(runner.graphs, "run", lambda inputs: replayed.append(1) or real(inputs))
        assert tokens_of(llm, many) == expected
        assert len(replayed) > 20


def test_what_was_chosen_for_an_engine_is_forgotten(engines: Any, model: Any) -> None:
    with engines.open_paged(
        model,
        engines.PlainPages(torch.device("cpu")),
        16,
        max_model_len=64,
        kv_cache_memory_bytes="1MiB",
    ):
        pass
    with engines.open_ours(model, max_model_len=64, kv_cache_memory_bytes="16MiB") as llm:
        assert type(llm.llm_engine.manager).__name__ == "VTensorManager"
        assert not isinstance(llm.llm_engine.runner.backend, engines.PagedAttention)


def test_a_kernel_that_is_wrong_here_is_left_out_with_the_reason(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    ((kernel, page_tokens), *_), _ = engines.paged_kernels(cpu, 32)
    assert (kernel.name, page_tokens) == ("gather", 16)
    monkeypatch.setattr(engines, "try_kernel", lambda *args: 0.1)
    found, reasons = engines.paged_kernels(cpu, 32)
    assert not found
    assert "off by 0.1" in reasons["gather"]


def test_the_least_recently_freed_page_loses_its_name_first(engines: Any) -> None:
    from pages import PagePool

    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    pool.record(first, b"first")
    pool.record(second, b"second")
    pool.record(second, b"other name")
    pool.give_back(second)
    pool.give_back(first)
    assert pool.find(b"other name") is None
    pool.share(second)
    assert [pool.take(), pool.take()] == [2, first]
    assert (pool.find(b"first"), pool.find(b"second")) == (None, second)
    assert (pool.num_evicted, len(pool.free)) == (1, 0)


def test_ratios_are_to_the_same_kernel_and_as_many_requests(engines: Any) -> None:
    import bench

    def row(engine: str, kernel: str, of: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
        head = {"engine": engine, "kernel": kernel, "of": of, "requests": of}
        return head | {"tokens_per_s": tokens_per_s, **more}

    ours = [row("flexinfer", "torch", 5, 96.0), row("flexinfer", "torch", 1, 90.0)]
    cut = row("flexinfer", "triton", 5, 50.0, requests=4)
    rows = [*ours, cut, row("pages", "torch", 5, 100.0), row("pages", "triton", 5, 10.0)]
    bench.add_ratios(rows)
    assert ours[0]["vs_pages"] == 0.96
    assert all("vs_pages" not in other for other in rows[1:])
