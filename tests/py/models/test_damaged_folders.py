"""JSON and templates of a folder that are damaged: refused by the file's name, not passed over."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import AsyncLLM, UnsupportedModelError
from flexinfer.engine.inputs import load_tokenizer
from flexinfer.models.hub import asking_if_it_answers
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.server.settings import ServerSettings
from flexinfer.server.state import ServerState

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n"


@pytest.fixture
def folder(model_path: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path, tmp_path / "model"))


@pytest.mark.parametrize("content", ["{", "", LFS_POINTER, "[1]", "null", b"\xff\xfe"])
def test_a_generation_config_that_is_no_json_object_is_refused(
    folder: Path, content: str | bytes
) -> None:
    """transformers takes the defaults: tokens that end an answer would not end it."""
    file = folder / "generation_config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json' (cannot be|must)"):
        load_model(str(folder))


@pytest.mark.parametrize("eos", ["x", ["x"], 1.5, True, {}])
def test_an_end_of_sequence_that_is_no_token_id_is_refused(folder: Path, eos: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UnsupportedModelError, match=r"eos_token_id.* must be .*generation_config"):
        load_model(str(folder))


def test_a_model_that_needs_code_of_its_repository_is_told_so(folder: Path) -> None:
    """transformers advises an argument that changes nothing here."""
    own = {"model_type": "someones", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModelError, match=r"no code of a repository is run here$"):
        load_model(str(folder))


@pytest.mark.parametrize("advice", [{"max_new_tokens": 0}, {"early_stopping": "x"}])
def test_advice_that_nobody_heeds_here_ends_no_start(folder: Path, advice: dict[str, Any]) -> None:
    """transformers refused it, and named no file: not even an operator's own advice helped."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 5, **advice}))
    assert load_model(str(folder)).eos_token_ids == {5}
    assert load_model(str(folder), quantization="int8").eos_token_ids == {5}


def test_a_generation_config_may_be_missing(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder)).eos_token_ids == {1}


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "tokenizer"])
@pytest.mark.parametrize("content", ["{", "[1]", LFS_POINTER])
def test_a_tokenizers_file_that_is_no_json_object_is_named(
    folder: Path, name: str, content: str
) -> None:
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=rf"/{name}\.json' (cannot be|must)"):
        load_tokenizer(None, str(folder))


def test_a_wrong_type_that_only_use_shows_is_refused_at_load(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "x"}))
    with pytest.raises(UnsupportedModelError, match="no tokenizer can be loaded from"):
        load_tokenizer(None, str(folder))


@pytest.mark.parametrize("name", ["/nonexistent", "./no/such", "some/other/folder"])
def test_a_tokenizers_folder_that_is_not_there_is_said_to_be_so(name: str) -> None:
    """It spoke of the hub."""
    with pytest.raises(UnsupportedModelError, match=f"^tokenizer folder '{name}' does not exist$"):
        load_tokenizer(name, "model")


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_of_a_file_its_folder_is_asked_for(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a folder that does not exist, and here a config file without JSON."""
    monkeypatch.chdir(folder)
    load = load_config if what == "model" else partial(load_tokenizer, None)
    for name, stands_in in (
        (str(folder / "model.safetensors"), str(folder)),
        ("model.safetensors", "."),
    ):
        with pytest.raises(UnsupportedModelError) as refusal:
            load(name)
        assert str(refusal.value) == (
            f"{what} {name!r} is a file: name the folder that it stands in, {stands_in!r}"
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nosuch.gguf", "model file 'nosuch.gguf' cannot be read: there is no such file"),
        ("no/such.safetensors", "model 'no/such.safetensors' does not exist; name the folder"),
    ],
)
def test_a_file_that_is_not_there_is_said_to_be_so(name: str, says: str) -> None:
    """It said that the hub does not answer."""
    with pytest.raises(UnsupportedModelError) as refusal, asking_if_it_answers([name]):
        load_config(name)
    assert str(refusal.value).startswith(says)


def test_a_server_does_not_start_on_a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if")
    llm = AsyncLLM(str(folder), kv_cache_memory_bytes=16 << 20)
    try:
        with pytest.raises(ValueError, match="the chat template is broken in line 1"):
            ServerState(llm, ServerSettings(served_model_names=("m",)))
        ServerState(llm, ServerSettings(served_model_names=("m",), chat_template="{{ messages }}"))
    finally:
        llm.shutdown()
