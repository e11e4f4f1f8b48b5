"""vLLM's metrics, by name, type, labels and buckets: what dashboards and alerts for it rely on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from prometheus_client.metrics_core import Metric

from flexinfer import LLM, SamplingParams
from flexinfer.engine.prometheus_families import engine_families
from helpers.tiny_models import make_model, random_prompts

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 1920.0)
LENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
GAUGES = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_waiting_by_reason": ("reason",),
    "engine_sleep_state": ("sleep_state",),
    "kv_cache_usage_perc": (),
    "cache_config_info": ("block_size", "num_gpu_blocks"),
}
COUNTERS = {
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
    "num_preemptions": (),
    "prompt_tokens": (),
    "prompt_tokens_by_source": ("source",),
    "prompt_tokens_cached": (),
    "generation_tokens": (),
    "request_success": ("finished_reason",),
    "spec_decode_num_drafts": (),
    "spec_decode_num_draft_tokens": (),
    "spec_decode_num_accepted_tokens": (),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
}
HISTOGRAMS = {
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "iteration_tokens_total": (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 8192.0, 16384.0),
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_params_max_tokens": LENGTHS,
    "time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 640.0, 2560.0),
    "inter_token_latency_seconds": TOKEN_S,
    "request_time_per_output_token_seconds": TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_inference_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_prefill_kv_computed_tokens": LENGTHS,
}
ABSENT = {
    *("prompt_tokens_recomputed", "corrupted_requests", "lora_requests_info"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("mm_cache_queries", "mm_cache_hits"),
    *("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"),
    "kv_block_reuse_gap_seconds",
}
"""Of vLLM's, those of what is not here. Its names are those of its V1 engine in November 2026."""


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    """Of an engine that answered a prompt, the same once more, and three samples of another."""
    first, other = random_prompts((40, 24))
    with LLM(
        make_model("llama"),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes="16MiB",
        chunk_bytes=4096,
        enable_pre_extend=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for _ in range(2):
            llm.generate([first], params)
        llm.generate([other], SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
        stats = llm.llm_engine.stats()
    return {family.name: family for family in engine_families(stats, "tiny")}


def samples(family: Metric, suffix: str, label: str = "") -> dict[str, float]:
    return {
        one.labels.get(label, ""): one.value
        for one in family.samples
        if one.name == f"{family.name}{suffix}"
    }


@pytest.mark.parametrize(
    ("kind", "names"), [("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)]
)
def test_vllms_names_have_its_types_and_labels(
    kind: str, names: dict[str, Any], families: dict[str, Metric]
) -> None:
    for name, labels in names.items():
        family = families[f"flexinfer:{name}"]
        assert family.type == kind
        further = set(labels) if kind != "histogram" else {"le"}
        for sample in family.samples:
            if kind != "histogram" or sample.name.endswith("_bucket"):
                assert {"model_name", "engine"} | further <= set(sample.labels)
            assert sample.labels["engine"] == "0"


def test_vllms_buckets_are_among_ours(families: dict[str, Metric]) -> None:
    for name, bounds in HISTOGRAMS.items():
        ours = samples(families[f"flexinfer:{name}"], "_bucket", "le")
        assert set(bounds) <= {float(bound) for bound in ours}


def test_what_is_absent_is_named_with_its_reason(families: dict[str, Metric]) -> None:
    text = DOCS.read_text()
    section = text[text.index("## vLLM's metrics") :]
    assert set(re.findall(r"`(\w+)`", section)) >= ABSENT
    assert not {f"flexinfer:{name}" for name in ABSENT} & set(families)


def test_prompt_tokens_are_told_by_their_source(families: dict[str, Metric]) -> None:
    by_source = samples(families["flexinfer:prompt_tokens_by_source"], "_total", "source")
    cached = samples(families["flexinfer:prompt_tokens_cached"], "_total")[""]
    assert 0 < cached < 40
    assert by_source == {"local_compute": 104 - cached, "local_cache_hit": cached}
    computed = families["flexinfer:request_prefill_kv_computed_tokens"]
    assert samples(computed, "_sum")[""] == 104 - cached


def test_requests_are_told_by_what_they_ask(families: dict[str, Metric]) -> None:
    def total(name: str, suffix: str = "_sum") -> float:
        return samples(families[f"flexinfer:{name}"], suffix)[""]

    assert total("request_params_n") == 1 + 1 + 3
    assert total("request_params_max_tokens") == 6 + 6 + 4
    assert total("request_max_num_generation_tokens") == 6 + 6 + 4
    assert total("request_generation_tokens") == 6 + 6 + 3 * 4
    assert total("request_inference_time_seconds", "_count") == 3
    assert total("iteration_tokens_total", "_count") == total_steps(families)


def total_steps(families: dict[str, Metric]) -> float:
    return samples(families["flexinfer:engine_steps"], "_total")[""]


def test_the_cache_is_told_as_tokens(families: dict[str, Metric]) -> None:
    (sample,) = families["flexinfer:cache_config_info"].samples
    budget = samples(families["flexinfer:kv_cache_budget_bytes"], "")[""]
    num_tokens = int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"])
    assert 0 < num_tokens <= budget
    assert budget % num_tokens < num_tokens


def test_an_engine_that_waits_for_nothing_is_awake(families: dict[str, Metric]) -> None:
    states = samples(families["flexinfer:engine_sleep_state"], "", "sleep_state")
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    reasons = samples(families["flexinfer:num_requests_waiting_by_reason"], "", "reason")
    assert reasons == {"capacity": 0, "deferred": 0}
