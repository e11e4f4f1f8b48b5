"""The memory map of a model of which layers have a window: a row for each group of layers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from flexinfer import AsyncLLM, LLMEngine, SamplingParams
from flexinfer.cli.app import app
from flexinfer.config import EngineConfig
from flexinfer.engine.prometheus_families import engine_families
from flexinfer.server.observability.memory_map import MemoryMap
from flexinfer.speculation.step_costs import StepCosts
from helpers.engine_kit import make_engine as make_tiny_engine
from helpers.engine_kit import submit
from helpers.hybrids import make_engine as make_hybrid_engine
from helpers.tiny_models import make_model, make_tokenizer, random_prompts

WINDOW = 16
CHUNK = 4096


class Between:
    """Two steps of an engine that the test drives: what a MemoryMap asks of an AsyncLLM."""

    tokenizer = make_tokenizer()

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    async def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        return function(self._engine)


def make_engine(name: str, **others: int) -> LLMEngine:
    settings = {"kv_cache_memory_bytes": 4 << 20, "chunk_bytes": CHUNK, "max_num_seqs": 2, **others}
    return LLMEngine.from_engine_args(
        EngineConfig(model=make_model(name), skip_tokenizer_init=True, **cast(Any, settings))
    )


def map_of(name: str, num_steps: int) -> dict[str, Any]:
    engine = make_engine(name)
    submit(engine, random_prompts((100,)), SamplingParams(temperature=0, max_tokens=60))
    for _ in range(num_steps):
        engine.step()
    engine.manager.drain()
    llm = cast(AsyncLLM, Between(engine))
    rendered = asyncio.run(MemoryMap(llm, name, shows_salted=True).render())
    engine.close()
    found: dict[str, Any] = json.loads(rendered.body)
    return found


@pytest.mark.parametrize(
    ("name", "windows"), [("gemma2", [None, WINDOW]), ("mistral", [WINDOW]), ("llama", [None])]
)
def test_the_map_tells_the_groups_of_layers(name: str, windows: list[int | None]) -> None:
    found = map_of(name, 1)
    assert [group["window"] for group in found["groups"]] == windows
    assert sum(group["num_layers"] for group in found["groups"]) == 4
    assert sum(group["row_bytes"] for group in found["groups"]) == CHUNK * found["num_planes"]


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_what_a_window_has_left_has_no_chunk_at_the_head_of_its_row(name: str) -> None:
    found = map_of(name, 50)
    running = next(one for one in found["vtensors"] if one["state"] == "live")
    *full, near = running["groups"]
    num_back = near.count(None)
    assert near[:num_back] == [None] * num_back
    end = running["num_tokens"] - WINDOW + 1
    assert end - found["row_tokens"] < num_back * found["row_tokens"] <= end
    assert num_back == running["rows_given_back"]
    assert all(None not in row and len(row) == len(near) for row in full)
    assert running["chunks"] == (full[0] if full else near[num_back:])
    known = {chunk["id"] for chunk in found["chunks"]}
    assert known >= {chunk for row in running["groups"] for chunk in row if chunk is not None}


def test_the_map_and_inspect_say_whose_state_a_vtensor_holds(tmp_path: Path) -> None:
    engine = make_hybrid_engine("bamba", enable_prefix_caching=False)
    submit(engine, random_prompts((20, 30)), SamplingParams(temperature=0, max_tokens=9))
    for _ in range(4):
        engine.step()
    llm = cast(AsyncLLM, Between(engine))
    body = asyncio.run(MemoryMap(llm, "tiny", shows_salted=True).render()).body
    engine.close()
    live = [one for one in json.loads(body)["vtensors"] if one["state"] == "live"]
    assert sorted(one["request_id"] for one in live if one["request_id"]) == ["0", "1"]
    states = [one for one in live if one["state_of"]]
    assert sorted(one["state_of"] for one in states) == ["0", "1"]
    assert {one["num_tokens"] for one in states} == {engine.manager.spec.state.num_tokens}
    file = tmp_path / "map.json"
    file.write_bytes(body)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["inspect", "--file", str(file), "--tables"]
    )
    assert "0, state" in shown.stdout


def test_the_map_has_the_draft_models_part_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out, so that the budget seemed to be a part of what it is."""
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))
    method = {"method": "draft_model", "num_speculative_tokens": 3}
    engine = make_tiny_engine(
        speculative_config={**method, "model": make_model("llama")}, kv_cache_memory_bytes="8MiB"
    )
    submit(engine, random_prompts((20, 30)), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(4):
        engine.step()
    llm = cast(AsyncLLM, Between(engine))
    found = json.loads(asyncio.run(MemoryMap(llm, "tiny", shows_salted=True).render()).body)
    engine.close()
    draft = found["draft_model"]
    live = [one for one in draft["vtensors"] if one["state"] == "live"]
    assert sorted(one["request_id"] for one in live) == ["0", "1"]
    budgets = [pool["stats"]["budget_bytes"] for pool in (found, draft)]
    assert 8 * 2**20 - 65536 < sum(budgets) <= 8 * 2**20
    assert draft.keys() == found.keys() - {
        *("object", "sequence", "time", "model", "engine", "draft_model")
    }


def test_without_a_draft_model_the_map_has_none() -> None:
    assert map_of("llama", 1)["draft_model"] is None


def test_the_metrics_tell_what_a_token_takes_in_each_group() -> None:
    engine = make_engine("gemma2")
    families = {family.name: family for family in engine_families(engine.stats(), "tiny")}
    samples = families["flexinfer:kv_group_token_bytes"].samples
    found = {(one.labels["window"], one.labels["num_layers"]): one.value for one in samples}
    half = engine.manager.spec.bytes_per_token / 2
    assert found == {("all", "2"): half, (str(WINDOW), "2"): half}
    engine.close()


@pytest.mark.parametrize("make", [make_engine, make_hybrid_engine])
def test_the_metrics_tell_what_the_state_of_a_sequence_takes(
    make: Callable[[str], LLMEngine],
) -> None:
    engine = make("gemma2" if make is make_engine else "bamba")
    families = {family.name: family for family in engine_families(engine.stats(), "tiny")}
    (sample,) = families["flexinfer:kv_state_bytes"].samples
    vtensor = engine.manager.create()
    vtensor.extend(engine.manager.spec.state.num_tokens)
    assert sample.value == vtensor.info().mapped_bytes
    assert (sample.value > 0) == (make is make_hybrid_engine)
    vtensor.release()
    engine.close()


def test_inspect_says_which_window_made_a_match_shorter(tmp_path: Path) -> None:
    """A beginning that ends where the windows of the whole prompt have left it."""
    engine = make_engine("gemma2", max_num_batched_tokens=32)
    (prompt,) = random_prompts((100,))
    params = SamplingParams(temperature=0, max_tokens=2)
    submit(engine, [prompt], params)
    while engine.has_unfinished_requests():
        engine.step()
        engine.manager.drain()  # what a part of the prompt has left is gone before it is recorded
    submit(engine, [[*prompt[:60], 1]], params)
    engine.step()
    llm = cast(AsyncLLM, Between(engine))
    rendered = asyncio.run(MemoryMap(llm, "tiny", shows_salted=True).render())
    engine.close()
    file = tmp_path / "map.json"
    file.write_bytes(rendered.body)
    running = next(one for one in json.loads(rendered.body)["vtensors"] if one["state"] == "live")
    assert (running["num_cached_tokens"], running["num_cut_tokens"]) == (0, 60)
    assert running["cut_by_window"] == WINDOW
    runner = CliRunner(env={"COLUMNS": "200"})
    assert (
        "0 of 60 (window 16)"
        in runner.invoke(app, ["inspect", "--file", str(file), "--tables"]).stdout
    )


def test_inspect_shows_what_was_given_back(tmp_path: Path) -> None:
    found = map_of("gemma2", 50)
    back = next(one for one in found["vtensors"] if one["state"] == "live")["rows_given_back"]
    file = tmp_path / "map.json"
    file.write_text(json.dumps(found))
    runner = CliRunner(env={"COLUMNS": "200"})
    short = runner.invoke(app, ["inspect", "--file", str(file)]).stdout
    assert f"2 keep all tokens, 2 keep the last 16; {back} rows given back" in short
    lines = runner.invoke(app, ["inspect", "--file", str(file), "--map"]).stdout.splitlines()
    near = next(line for line in lines if line.startswith("0, window 16 "))
    assert near.count("·") == back
    assert "·  given back: a window has left it" in lines
    picture = tmp_path / "map.png"
    runner.invoke(app, ["inspect", "--file", str(file), "--picture", str(picture)])
    assert picture.stat().st_size > 1000


def test_layers_that_all_keep_everything_are_told_once() -> None:
    found = map_of("llama", 2)
    assert found["vtensors"]
    assert all("groups" not in one for one in (*found["vtensors"], *found["prefixes"]))


def test_the_metrics_count_the_bytes_of_a_draft_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))
    llama = make_model("llama")
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": llama}
    engine = make_tiny_engine(llama, speculative_config=config)
    submit(engine, random_prompts((20,)), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(3):
        engine.step()
    stats = engine.stats()
    assert stats.memory is not None
    assert stats.draft_memory is not None
    families = {family.name: family for family in engine_families(stats, "tiny")}
    for kind in ("budget", "resident", "mapped"):
        (sample,) = families[f"flexinfer:kv_cache_{kind}_bytes"].samples
        of_draft = getattr(stats.draft_memory, f"{kind}_bytes")
        assert of_draft > 0
        assert sample.value == getattr(stats.memory, f"{kind}_bytes") + of_draft
    engine.close()
