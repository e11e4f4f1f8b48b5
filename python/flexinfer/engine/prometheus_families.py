"""An engine's numbers as Prometheus metric families; docs/metrics.md lists them.

Names and units are vLLM's where a meaning is shared, with the prefix `flexinfer:`. Every family is
there from the start. Pure functions of an `EngineStats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from flexinfer.scheduler.preemption import all_counts

if TYPE_CHECKING:
    from flexinfer.metrics.requests import Histogram, RequestStats
    from flexinfer.metrics.speculation import SpeculationStats
    from flexinfer.metrics.steps import EngineStats
    from flexinfer.vtensor import Stats

PREFIX = "flexinfer:"
ENGINE = "0"
"""vLLM numbers its engines; there is one here."""
Values = Mapping[tuple[str, ...], float]
"""Values of further labels -> value."""
FINISH_REASONS = ("stop", "length", "abort", "error")
US_PER_S = 1e6

MEMORY_BYTES = {
    "reserved": "Virtual: all ranges.",
    "mapped": "Virtual: behind live vTensors, aliases counted each time.",
    "resident": "Physical: created chunks.",
    "shared": "Physical: chunks that more than one live vTensor maps.",
    "saved": "What sharing saves: mapped by live vTensors minus their distinct chunks.",
    "free": "Physical: created, without reference.",
    "parked": "Virtual: mapped behind released slots, for the next request.",
    "held": "Virtual: mapped behind released vTensors whose views live.",
    "recorded": "Physical: chunks of recorded prefixes.",
    "swapped": "Host: contents of swapped-out requests.",
    "asleep": "Host: contents of a sleeping engine.",
    "budget": "Physical: the most that may be created.",
}
CHUNK_TOTALS = {
    "aliased": "Mapped for another request instead of filled again.",
    "copied": "Tail chunks copied on write.",
    "evicted": "Taken from recorded prefixes.",
    "adopted": "Found mapped in a parked slot.",
    "deduplicated": "Computed twice and mapped onto one.",
    "given_back": "Left behind by a sliding window.",
    "swapped_out": "Written to the host store.",
    "swapped_in": "Read back from it.",
}
LATENCIES = {
    "first_token_s": ("time_to_first_token_seconds", "From arrival to the first token."),
    "inter_token_s": ("inter_token_latency_seconds", "Between steps that gave a sequence tokens."),
    "per_output_token_s": (
        "request_time_per_output_token_seconds",
        "Mean time of a request's tokens after the first.",
    ),
    "end_to_end_s": ("e2e_request_latency_seconds", "From arrival to the end."),
    "queue_s": ("request_queue_time_seconds", "From arrival to the first step."),
    "prefill_s": ("request_prefill_time_seconds", "From the first step to the first token."),
    "decode_s": ("request_decode_time_seconds", "From the first token to the end."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens per request."),
    "request_generation_tokens": ("request_generation_tokens", "Generated tokens per request."),
    "inference_s": ("request_inference_time_seconds", "From the first step to the end."),
    "computed_prompt_tokens": (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens per request that were not found recorded.",
    ),
    "longest_sample_tokens": (
        "request_max_num_generation_tokens",
        "Generated tokens of the longest sample of a request.",
    ),
    "asked_samples": ("request_params_n", "n of requests."),
    "asked_tokens": ("request_params_max_tokens", "max_tokens of requests."),
}


def engine_families(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    """All families of a running engine."""
    make = Maker(model_name)
    yield from _engine(stats, make)
    if stats.requests is not None:
        yield from _requests(stats.requests, make)
    yield _groups(stats, make)
    yield _states(stats, make)
    if stats.speculation is not None:
        yield from _speculation(stats.speculation, make)
    if stats.memory is not None:
        yield from _memory_bytes(stats, make)
        yield from _memory(stats.memory, make)
        yield from _mapping(stats.memory, make)


class Maker:
    """Families that all carry the labels model_name and engine, as vLLM's do."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": ENGINE}

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), {(): value})

    def gauges(
        self, name: str, text: str, labels: tuple[str, ...], values: Values
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=[*self._labels])
        buckets = [(_bound_text(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric([*self._labels.values()], buckets, histogram.sum)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """`name` without _total, which the exposition adds."""
        return self.counters(name, text, (), {(): value})

    def counters(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, *labels])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family


def _engine(stats: EngineStats, make: Maker) -> Iterator[Metric]:
    steps = stats.steps
    decode_tokens = steps.num_tokens - steps.num_prefill_tokens
    yield make.gauge("num_requests_running", "Requests that run.", stats.num_running)
    yield make.gauge("num_requests_waiting", "Requests that wait.", stats.num_waiting)
    yield make.gauges(
        "cache_config_info",
        "1; block_size times num_gpu_blocks are the tokens that the budget holds.",
        ("block_size", "num_gpu_blocks"),
        {("1", str(stats.capacity_tokens)): 1},
    )
    deferred = min(stats.num_deferred, stats.num_waiting)
    yield make.gauges(
        "num_requests_waiting_by_reason",
        "Waiting for room, or deferred until another request has computed their prefix.",
        ("reason",),
        {("capacity",): stats.num_waiting - deferred, ("deferred",): deferred},
    )
    yield make.gauge("num_requests_swapped", "Requests swapped out.", stats.num_swapped)
    yield make.gauge("engine_sleeping", "1: KV memory is given back.", stats.is_sleeping)
    yield make.gauges(
        "engine_sleep_state",
        "1 in the state that holds. Weights are never given up here.",
        ("sleep_state",),
        {
            ("awake",): not stats.is_sleeping,
            ("weights_offloaded",): 0,
            ("discard_all",): 0,
        },
    )
    yield make.gauge(
        "extension_depth_tokens",
        "How far ahead of a decode memory is mapped.",
        stats.extension_depth_tokens,
    )
    yield make.counters(
        "num_preemptions",
        "Times that a running request lost its memory.",
        ("mode", "reason"),
        _preemptions(stats),
    )
    yield make.counter(
        "prefix_waits", "Requests put off until their prefix is computed.", stats.num_prefix_waits
    )
    yield make.counter("promoted_requests", "Requests that became due.", stats.num_promoted)
    yield make.counter("engine_steps", "Steps.", steps.num_steps)
    if stats.step_tokens is not None:
        yield make.histogram("iteration_tokens_total", "Tokens per step.", stats.step_tokens)
    yield make.counter("engine_step_seconds", "Time in steps.", steps.step_us / US_PER_S)
    yield make.counters(
        "computed_tokens",
        "Tokens that went through the model, recomputation included.",
        ("phase",),
        {("prefill",): steps.num_prefill_tokens, ("decode",): decode_tokens},
    )


def _preemptions(stats: EngineStats) -> dict[tuple[str, ...], float]:
    """By mode and reason, those that have not been too: a counter that begins with its first event
    has no rate at that event."""
    counts = all_counts()
    for mode, reasons in stats.preemptions.items():
        counts.update({(mode, reason): count for reason, count in reasons.items()})
    return counts


def _requests(requests: RequestStats, make: Maker) -> Iterator[Metric]:
    yield make.counter("prompt_tokens", "Prompt tokens taken in.", requests.prompt_tokens)
    yield make.counter("generation_tokens", "Tokens generated.", requests.generation_tokens)
    cached = requests.cached_prompt_tokens
    yield make.counter("prompt_tokens_cached", "Prompt tokens found recorded.", cached)
    yield make.counters(
        "prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        ("source",),
        {("local_compute",): requests.prompt_tokens - cached, ("local_cache_hit",): cached},
    )
    yield make.counters(
        "request_success",
        "Requests that have ended, by reason.",
        ("finished_reason",),
        {(reason,): requests.finished[reason] for reason in FINISH_REASONS},
    )
    for field, (name, text) in LATENCIES.items():
        yield make.histogram(name, text, getattr(requests, field))


def _speculation(stats: SpeculationStats, make: Maker) -> Iterator[Metric]:
    """As in vLLM, only where there is speculation."""
    yield make.counter("spec_decode_num_drafts", "Proposals verified.", stats.num_drafts)
    yield make.counter(
        "spec_decode_num_draft_tokens", "Tokens of these proposals.", stats.num_draft_tokens
    )
    yield make.counter(
        "spec_decode_num_accepted_tokens", "Of these accepted.", stats.num_accepted_tokens
    )
    yield make.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Of these accepted, by their position in the proposal.",
        ("position",),
        {(str(i),): count for i, count in enumerate(stats.accepted_per_position)},
    )


def _bound_text(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(bound)


def _groups(stats: EngineStats, make: Maker) -> Metric:
    return make.gauges(
        "kv_group_token_bytes",
        "KV of one token in layers that keep the same tokens: the last `window`, or all.",
        ("window", "num_layers"),
        {
            (str(each.window or "all"), str(each.num_layers)): each.token_bytes
            for each in stats.kv_groups
        },
    )


def _states(stats: EngineStats, make: Maker) -> Metric:
    return make.gauge(
        "kv_state_bytes",
        "Physical: the recurrent state of one sequence; a model without has 0.",
        stats.kv_state_bytes,
    )


def _memory_bytes(stats: EngineStats, make: Maker) -> Iterator[Metric]:
    """Of both managers, where a draft model has one."""
    managers = [each for each in (stats.memory, stats.draft_memory) if each is not None]
    for kind, text in MEMORY_BYTES.items():
        value = sum(getattr(each, f"{kind}_bytes") for each in managers)
        yield make.gauge(f"kv_cache_{kind}_bytes", text, value)


def _memory(memory: Stats, make: Maker) -> Iterator[Metric]:
    used = 1 - memory.available_bytes / memory.budget_bytes if memory.budget_bytes else 0.0
    yield make.gauge(
        "kv_cache_usage_perc", "Part of the KV memory that no request could get, 0 to 1.", used
    )
    yield make.gauge(
        "kv_cache_obtainable_bytes",
        "Physical: what requests could still have, evicting included.",
        memory.available_bytes,
    )
    yield make.gauge("num_vtensors", "Live vTensors.", memory.num_vtensors)
    yield make.gauge("num_free_slots", "Slots free or parked.", memory.num_free_slots)
    yield make.gauge(
        "num_broken_slots",
        "Slots that a failing driver left unusable until they are repaired.",
        memory.num_broken_slots,
    )
    yield make.gauge("recorded_tokens", "Tokens of recorded prefixes.", memory.recorded_tokens)
    for kind, text in CHUNK_TOTALS.items():
        yield make.counter(f"chunks_{kind}", text, getattr(memory, f"chunks_{kind}"))
    yield make.counter(
        "prefix_cache_queries", "Prompt tokens looked up.", memory.prefix_query_tokens
    )
    yield make.counter("prefix_cache_hits", "Of these found recorded.", memory.prefix_hit_tokens)


def _mapping(memory: Stats, make: Maker) -> Iterator[Metric]:
    yield make.counters(
        "mapping_time_seconds",
        "Driver time: exposed, a step waited for it; hidden, on the worker.",
        ("kind",),
        {
            ("exposed",): memory.map_us_exposed / US_PER_S,
            ("hidden",): memory.map_us_hidden / US_PER_S,
        },
    )
    calls = memory.driver_calls
    yield make.counters(
        "driver_calls",
        "Calls to the memory driver.",
        ("call",),
        {(kind,): entry.calls for kind, entry in calls.items()},
    )
    yield make.counters(
        "driver_call_seconds",
        "Their time, exposed (a step waited) or hidden.",
        ("call", "kind"),
        {
            (kind, who): us / US_PER_S
            for kind, entry in calls.items()
            for who, us in (("exposed", entry.us - entry.hidden_us), ("hidden", entry.hidden_us))
        },
    )
    yield make.counter(
        "pre_extend_failures", "Times the worker found no memory.", memory.pre_extend_failures
    )
