"""Weights that are cut off, still being downloaded, or a git-LFS pointer: refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flexinfer import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.tiny_models import make_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4467080\n"
BROKEN = r"model\.safetensors' is no whole safetensors file: it is cut off, still being downloaded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda whole: whole[: len(whole) // 2], BROKEN),
        (lambda whole: whole[:100], BROKEN),
        (lambda whole: b"", BROKEN),
        (lambda whole: bytes(len(whole)), BROKEN),
        (lambda whole: whole + b"x", BROKEN),
        (lambda whole: POINTER, r"model\.safetensors' is a git-LFS pointer.*`git lfs pull`"),
    ],
    ids=["half", "header", "empty", "zeros", "longer", "pointer"],
)
def test_a_file_that_is_not_whole_is_named(
    damage: Callable[[bytes], bytes], says: str, folder: Path
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(str(folder))


@pytest.mark.parametrize("text", ['{"weight_map": ', "", "[]", "{}", '{"weight_map": ["a"]}'])
def test_an_index_that_is_damaged_is_named(text: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"index\.json' is damaged: .*weight_map"):
        load_model(str(folder))
