"""Repositories of a hub: revisions, and a hub that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.config import EngineConfig
from flexinfer.models.hub import at_revision, is_hub_id
from helpers.small_hub import COMMIT, SmallHub, small_hub

REPOSITORY = "someone/tiny"
NOWHERE = "http://127.0.0.1:9"
READ = """
import json, sys
from flexinfer import LLM
settings = json.loads(sys.argv[1])
try:
    with LLM(kv_cache_memory_bytes="8MiB", **settings) as llm:
        (output,) = llm.generate("hello", use_tqdm=False)
        config = llm.llm_engine.config
        found = [str(config.model), str(config.tokenizer), len(output.outputs[0].token_ids) > 0]
except Exception as error:
    found = [type(error).__name__, str(error), False]
print(json.dumps(found))
"""


def read(hub: str, cache: Path, **settings: Any) -> Any:
    """What a process of its own makes of them."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", READ, json.dumps({"model": REPOSITORY, **settings})],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def hub(model_path: str) -> Iterator[SmallHub]:
    with small_hub(REPOSITORY, Path(model_path)) as running:
        yield running


def test_a_revision_is_fetched_into_the_folder_that_is_named(hub: SmallHub, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    model, tokenizer, spoke = read(
        hub.url, tmp_path, revision="v1", download_dir=str(folder), hf_token="secret"
    )
    assert spoke, (model, tokenizer)
    assert Path(model).name == COMMIT
    assert Path(model).is_relative_to(folder)
    assert tokenizer == model
    assert "model.safetensors" in hub.fetched


def test_a_hub_that_does_not_answer_is_not_waited_for(hub: SmallHub, tmp_path: Path) -> None:
    """Each file was asked for five times more, in half a minute; a cached model took minutes."""
    start_s = time.monotonic()
    kind, message, _ = read(NOWHERE, tmp_path)
    assert time.monotonic() - start_s < 20
    assert kind == "UnsupportedModelError"
    assert message.startswith(f"model '{REPOSITORY}' is neither a folder nor in the cache, and the")
    assert f"({NOWHERE}) does not answer: " in message
    assert read(hub.url, tmp_path)[2]
    start_s = time.monotonic()
    assert read(NOWHERE, tmp_path) == [REPOSITORY, "None", True]
    assert time.monotonic() - start_s < 25


def test_a_repository_that_there_is_not_is_told_so(hub: SmallHub, tmp_path: Path) -> None:
    kind, message, _ = read(hub.url, tmp_path, model="other/model", revision="v1")
    assert kind == "UnsupportedModelError"
    assert message.startswith("other/model at revision 'v1' cannot be fetched: ")


@pytest.mark.parametrize("option", ["revision", "tokenizer_revision"])
def test_a_folder_has_no_revisions(option: str, model_path: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}='v1' is of a repository of the hub, and"):
        at_revision(EngineConfig(model=model_path, **{option: "v1"}))  # type: ignore[arg-type]


def test_of_a_folder_nothing_is_fetched(model_path: str, tmp_path: Path) -> None:
    config = EngineConfig(model=model_path, download_dir=tmp_path, hf_token="secret")
    assert at_revision(config).model == model_path
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("a/b", True), ("gpt2", True), ("a/b-GGUF", True)),
        *(("/a/b", False), ("./a", False), ("a/b:Q8_0", False)),
        *(("a/b.gguf", False), ("b.safetensors", False)),
    ],
)
def test_a_hub_id_looks_like_one(name: str, is_one: bool) -> None:
    assert is_hub_id(name) is is_one
