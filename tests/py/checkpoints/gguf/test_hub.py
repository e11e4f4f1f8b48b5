"""GGUF files of a hub's repository, by names such as someone/tiny-GGUF:Q8_0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.hub import _chosen, _types, files_hint, gguf_file
from flexinfer.errors import UnsupportedModelError
from helpers.gguf.files import Type, write_gguf
from helpers.gguf.models import CONFIGS, same
from helpers.small_hub import SmallHub, small_hub
from helpers.tiny_models import draw_model

REPOSITORY = "someone/tiny-GGUF"
READ = """
import json, sys
from flexinfer import LLM, SamplingParams
from flexinfer.checkpoints.gguf.hub import gguf_file
found, params = [], SamplingParams(temperature=0, max_tokens=8)
for name in sys.argv[1:]:
    try:
        with LLM(name, skip_tokenizer_init=True, kv_cache_memory_bytes="4MiB") as llm:
            (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
            identity = llm.llm_engine.handover.identity
        found.append([gguf_file(name), output.outputs[0].token_ids, identity.model])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""
NAMES = (
    *("Tiny-0.6B-Q4_K_M.gguf", "Tiny-0.6B-UD-Q4_K_M.gguf", "Tiny-0.6B.i1-IQ4_XS.gguf"),
    *("BF16/Tiny-0.6B-BF16-00001-of-00002.gguf", "BF16/Tiny-0.6B-BF16-00002-of-00002.gguf"),
    *("Tiny-0.6B-Q4_K.gguf", "tiny.f16.gguf", "q8_0.gguf"),
)


def read(hub: str, cache: Path, *names: str, offline: bool = False) -> Any:
    """What a process of its own finds by these names."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    result = subprocess.run(
        [sys.executable, "-c", READ, *names],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_gguf(folder / "tiny-Q8_0.gguf", draw_model(CONFIGS["llama"]()), same(Type.Q8_0))
    write_gguf(folder / "tiny-F16.gguf", draw_model(CONFIGS["qwen3"]()), same(Type.F16))
    (folder / "mmproj-tiny-F32.gguf").write_bytes(b"GGUF, of images")
    (folder / "README.md").write_text("Tiny models.")
    return folder


@pytest.fixture
def hub(files: Path) -> Any:
    with small_hub(REPOSITORY, files) as running:
        yield running


def test_it_is_fetched_once_and_then_found_without_the_hub(
    hub: SmallHub, files: Path, tmp_path: Path
) -> None:
    name = f"{REPOSITORY}:q8_0"
    found, local = read(hub.url, tmp_path, name, str(files / "tiny-Q8_0.gguf"))
    assert Path(found[0]).name == "tiny-Q8_0.gguf"
    assert found[1] == local[1]
    assert read(hub.url, tmp_path, name, offline=True) == [found]
    assert read("http://127.0.0.1:9", tmp_path, name) == [found]
    assert hub.fetched == ["tiny-Q8_0.gguf"]


def test_what_cannot_be_had_is_refused_with_what_there_is(hub: SmallHub, tmp_path: Path) -> None:
    names = f"{REPOSITORY}:Q4_0", f"{REPOSITORY}:F32", "other/x:Q8_0", REPOSITORY
    found = read(hub.url, tmp_path, *names)
    assert {kind for kind, _ in found} == {"UnsupportedModelError"}
    unknown, projector, missing, bare = (message for _, message in found)
    assert "has no GGUF file of the name 'Q4_0'; there are F16, Q8_0" in unknown
    assert "has no GGUF file of the name 'F32'" in projector
    assert "the hub has no such repository" in missing
    assert "config.json; it has GGUF files: name one, as someone/tiny-GGUF:F16" in bare
    assert hub.fetched == []


def test_without_a_hub_and_a_cache_it_says_so(tmp_path: Path) -> None:
    ((kind, message),) = read("http://127.0.0.1:9", tmp_path, f"{REPOSITORY}:Q8_0")
    assert kind == "UnsupportedModelError"
    assert message.startswith(f"model '{REPOSITORY}:Q8_0' cannot be fetched: ")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("q4_k_m", NAMES[:1]),
        ("UD-Q4_K_M", NAMES[1:2]),
        ("i1-IQ4_XS", None),
        ("IQ4_XS", NAMES[2:3]),
        ("BF16", NAMES[3:5]),
        (NAMES[4], NAMES[3:5]),
        ("Q4_K", NAMES[5:6]),
        ("F16", NAMES[6:7]),
        ("Q8_0", NAMES[7:]),
        (NAMES[0], NAMES[:1]),
        ("Q4", None),
        ("M", None),
    ],
)
def test_what_follows_the_colon_is_a_type_or_a_name(wanted: str, found: Any) -> None:
    if found is None:
        with pytest.raises(ValueError, match="has no GGUF file of the name"):
            _chosen("a/b", wanted, NAMES)
    else:
        assert _chosen("a/b", wanted, NAMES) == list(found)


def test_of_several_of_a_type_one_is_named_whole() -> None:
    names = ["one-Q8_0.gguf", "other-Q8_0.gguf"]
    with pytest.raises(ValueError, match=r"several .* 'Q8_0'; take one of one-Q8_0\.gguf, other"):
        _chosen("a/b", "Q8_0", names)
    assert _chosen("a/b", "other-Q8_0.gguf", names) == names[1:]
    assert _types(NAMES) == ["Q4_K_M", "UD-Q4_K_M", "IQ4_XS", "BF16", "Q4_K", "f16", "q8_0"]


def test_what_is_there_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b:Q8_0.gguf").write_bytes(b"GGUF")
    assert gguf_file("a/b:Q8_0.gguf") == "a/b:Q8_0.gguf"
    for name in ("a/b", "./b:Q8_0", "../b:Q8_0", "a:Q8_0", "a/b/c:Q8_0"):
        assert gguf_file(name) is None
    with pytest.raises(UnsupportedModelError, match="cannot be fetched"):
        gguf_file("a/b:Q4_0.gguf")


def test_no_hub_is_asked_what_a_folder_that_is_here_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose config cannot be read made it ask, and name the files of a stranger."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexinfer.checkpoints.gguf.hub._files", lambda _: (["x-Q8_0.gguf"], None))
    assert files_hint("a/b") == "; it has GGUF files: name one, as a/b:Q8_0"
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert files_hint("a/b") == ""
