"""An engine with `kv_events_config`: what it caches is told, and nothing is computed otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
msgspec = pytest.importorskip("msgspec")

from flexinfer import SamplingParams
from flexinfer.config import EngineConfig
from helpers.block_subscriber import KnownBlocks
from helpers.engine_kit import drain, make_engine, submit
from helpers.tiny_models import random_prompts


def test_prompts_and_answers_that_are_cached_are_told(tmp_path: Path) -> None:
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    engine = make_engine(kv_events_config=config)
    prompts = random_prompts((20, 40))
    submit(engine, prompts, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
    final = drain(engine)
    publisher = engine._events
    assert publisher is not None
    engine.manager.unwatch_blocks()
    publisher._threads[0].join()
    known = KnownBlocks()
    for _, payload, _ in publisher._kept:
        for event in msgspec.msgpack.decode(payload)[1]:
            known.apply(event)
    engine.close()
    paths = {tokens for _, tokens in known.paths.values()}
    for i, prompt in enumerate(prompts):
        text = (*prompt, *final[str(i)].outputs[0].token_ids)
        assert {text[:end] for end in range(16, len(text) - 1, 16)} <= paths
    assert len(paths) == 3 + 4


@pytest.mark.parametrize("given", [None, {}, {"enable_kv_cache_events": True, "publisher": "null"}])
def test_events_are_off_unless_they_are_asked_for(given: object) -> None:
    assert EngineConfig(model="m", kv_events_config=given).kv_events is None  # type: ignore[arg-type]


def test_events_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_events_config needs prefix caching"):
        EngineConfig(
            model="m",
            enable_prefix_caching=False,
            kv_events_config={"enable_kv_cache_events": True},
        )
