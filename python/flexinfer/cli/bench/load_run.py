"""One run of `flexinfer bench serve`: settings checked, requests made, load run, results kept."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flexinfer.cli.bench.drafts import Counts, read_counts, summarize_drafts
from flexinfer.cli.bench.options import LoadOptions
from flexinfer.cli.endpoint import UNAUTHORIZED, USERS_KEY, Endpoint
from flexinfer.cli.errors import check_folder
from flexinfer.cli.result_file import result_file
from flexinfer.loadgen.arrivals import gamma_arrivals
from flexinfer.loadgen.client import ENDPOINTS, Client, Target
from flexinfer.loadgen.load import run_load
from flexinfer.loadgen.request import LoadRequest, Outcome
from flexinfer.loadgen.summary import METRICS, Summary, parse_goodput, summarize
from flexinfer.loadgen.vocabulary import load_vocabulary
from flexinfer.loadgen.workload import (
    RandomLengths,
    TraceScale,
    Workload,
    custom_workload,
    random_workload,
    trace_workload,
)
from flexinfer.runtime.json_options import read_mapping

DATASETS = ("random", "custom", "trace")


@dataclass(frozen=True, kw_only=True)
class LoadSettings(LoadOptions):
    """The options, checked. Raises ValueError for what cannot work."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--backend", self.backend, ENDPOINTS),
            ("--dataset-name", self.dataset_name, DATASETS),
        ):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
        if (self.dataset_name == "random") != (self.dataset_path is None):
            raise ValueError("--dataset-path goes with --dataset-name custom or trace")
        if self.save_detailed and not self.save_result:
            raise ValueError("--save-detailed goes with --save-result")
        if self.save_result:
            check_folder(
                self.result_dir / (self.result_filename or f"{self.backend}.json"), "--result-dir"
            )
        unknown = set(self.shown_metrics) - set(METRICS)
        if unknown:
            raise ValueError(f"--percentile-metrics knows {', '.join(METRICS)}, got {unknown}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ValueError(f"--metric-percentiles are 0 to 100, got {percentile}")
        _pairs(self.metadata, "--metadata")
        self.goodput_limits  # noqa: B018  checked before any work
        self.extra_fields  # noqa: B018  likewise
        if self.plot is not None:
            from flexinfer.cli.plot import check_can_plot

            check_can_plot(self.plot)
        gamma_arrivals(0, self.request_rate, self.burstiness, random.Random())

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    @property
    def shown_metrics(self) -> list[str]:
        return [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]

    @property
    def percentiles(self) -> list[float]:
        try:
            return [float(text) for text in self.metric_percentiles.split(",") if text.strip()]
        except ValueError:
            raise ValueError(
                f"--metric-percentiles are numbers, as in 90,99, got {self.metric_percentiles!r}"
            ) from None

    @property
    def goodput_limits(self) -> dict[str, float] | None:
        if self.more_goodput and not self.goodput:
            raise ValueError(f"unexpected arguments: {' '.join(self.more_goodput)}")
        return parse_goodput([*self.goodput, *(self.more_goodput or ())]) if self.goodput else None

    def workload(self) -> Workload:
        """Raises ValueError or OSError."""
        vocabulary = load_vocabulary(self.tokenizer, as_text=self.backend == "openai-chat")
        if self.dataset_path is None:
            lengths = RandomLengths(
                self.random_input_len,
                self.random_output_len,
                self.random_range_ratio,
                self.random_prefix_len,
            )
            return random_workload(self.num_prompts, lengths, vocabulary, self.seed)
        if self.dataset_name == "custom":
            return custom_workload(
                self.dataset_path, self.num_prompts, self.custom_output_len, self.seed
            )
        scale = TraceScale(
            self.trace_time_scale, self.trace_length_scale, self.max_input_len, self.max_output_len
        )
        return trace_workload(self.dataset_path, self.num_prompts, scale, vocabulary, self.seed)

    def arrivals_s(self, workload: Workload) -> list[float]:
        """A trace's own times, unless a rate is asked for."""
        if workload.arrivals_s is not None and self.request_rate == float("inf"):
            return workload.arrivals_s
        rng = random.Random(self.seed + 1)
        return gamma_arrivals(len(workload.requests), self.request_rate, self.burstiness, rng)

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return read_mapping("--extra-body", self.extra_body) if self.extra_body else {}

    def target(self, model: str) -> Target:
        headers = _pairs(self.header, "--header")
        if self.api_key:
            headers.setdefault("Authorization", f"Bearer {self.api_key}")
        options: dict[str, Any] = {"temperature": self.temperature}
        if self.ignore_eos:
            options["ignore_eos"] = True
        options.update(self.extra_fields)
        backend: Any = self.backend
        return Target(self.url, model, backend, self.endpoint, headers, options)


@dataclass(frozen=True)
class LoadResult:
    """What a run gave."""

    settings: dict[str, Any]
    summary: Summary
    outcomes: list[Outcome]
    drafts: Counts
    """What the server speculated; empty if nothing."""

    @property
    def first_error(self) -> str:
        return next((o.error for o in self.outcomes if o.error), "")

    def as_dict(self, *, detailed: bool = False) -> dict[str, Any]:
        out = {**self.settings, **self.summary.as_dict(), **self.drafts}
        if detailed:
            outcomes = self.outcomes
            out["input_lens"] = [o.num_prompt_tokens for o in outcomes]
            out["output_lens"] = [o.num_output_tokens for o in outcomes]
            out["start_times"] = [o.start_s for o in outcomes]
            out["ttfts"] = [o.first_token_s for o in outcomes]
            out["itls"] = [o.inter_token_s for o in outcomes]
            out["latencies"] = [o.latency_s for o in outcomes]
            out["generated_texts"] = [o.text for o in outcomes]
            out["errors"] = [o.error for o in outcomes]
        return out


def measure(settings: LoadSettings) -> LoadResult:
    """Run the load. Raises ValueError or OSError before it if the server refuses one request."""
    workload = settings.workload()
    arrivals_s = settings.arrivals_s(workload)
    with Endpoint(settings.url, settings.api_key) as endpoint:
        model = settings.model
        if model is None:
            model = endpoint.first_model()
        before = read_counts(endpoint)
        outcomes, duration_s = asyncio.run(
            _run(settings, settings.target(model), workload.requests, arrivals_s)
        )
        drafts = summarize_drafts(before, read_counts(endpoint))
    summary = summarize(outcomes, duration_s, settings.percentiles, settings.goodput_limits)
    about = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": settings.backend,
        "base_url": settings.url,
        "model_id": model,
        "dataset_name": settings.dataset_name,
        "dataset_path": str(settings.dataset_path) if settings.dataset_path else None,
        "num_prompts": len(workload.requests),
        "request_rate": "inf" if settings.request_rate == float("inf") else settings.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "goodput": settings.goodput_limits,
        **_pairs(settings.metadata, "--metadata"),
    }
    return LoadResult(about, summary, outcomes, drafts)


async def _run(
    settings: LoadSettings, target: Target, requests: list[LoadRequest], arrivals_s: list[float]
) -> tuple[list[Outcome], float]:
    from tqdm import tqdm

    async with Client(target) as client:
        for number in range(1 + settings.num_warmups):
            trial = await client.send(requests[number % len(requests)])
            if trial.error:
                raise ValueError(
                    f"{target.url}: a first request failed: {_told(trial.error, target)}"
                )
        with tqdm(total=len(requests), unit="req", disable=settings.disable_tqdm) as bar:
            return await run_load(
                requests,
                arrivals_s,
                client.send,
                max_concurrency=settings.max_concurrency,
                on_done=lambda _: bar.update(),
            )


def write_results(settings: LoadSettings, result: LoadResult) -> list[Path]:
    """The files that were asked for."""
    files = []
    if settings.save_result:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = settings.result_filename or f"{settings.backend}-{stamp}.json"
        file = settings.result_dir / name
        text = json.dumps(result.as_dict(detailed=settings.save_detailed), indent=1)
        with result_file(file) as part:
            part.write_text(text, encoding="utf-8")
        files.append(file)
    if settings.plot is not None:
        from flexinfer.loadgen.plot import plot_load

        title = f"{result.settings['model_id']} at {settings.url}"
        with result_file(settings.plot) as part:
            plot_load(part, result.outcomes, title)
        files.append(settings.plot)
    return files


def _pairs(items: list[str] | None, option: str) -> dict[str, str]:
    """["KEY=VALUE"] -> {KEY: VALUE}. Raises ValueError."""
    pairs = {}
    for item in items or ():
        key, sign, value = item.partition("=")
        if not (sign and key):
            raise ValueError(f"{option} takes KEY=VALUE, got {item!r}")
        pairs[key] = value
    return pairs


def _told(error: str, target: Target) -> str:
    """An outcome's error, in the words of this command where a key is missing or wrong."""
    if not error.startswith(f"{UNAUTHORIZED}: "):
        return error
    names = {name.lower() for name in target.headers}
    return f"{UNAUTHORIZED}: " + USERS_KEY.advice(
        error.removeprefix(f"{UNAUTHORIZED}: "), was_given="authorization" in names
    )
