"""Models in several GGUF files, as llama-gguf-split writes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
import torch
import transformers as tf

from flexinfer import LLM, SamplingParams
from flexinfer.checkpoints.gguf.checkpoint import GgufCheckpoint
from flexinfer.checkpoints.gguf.header import read_header
from flexinfer.errors import UnsupportedModelError
from helpers.gguf.files import Type, add_weights, finish, writer_of
from helpers.gguf.models import CONFIGS

PARTS = 4
"""Of a model of two layers; the first has no tensors."""


def part(folder: Path, number: int, count: int = PARTS) -> Path:
    return folder / f"m-{number:05}-of-{count:05}.gguf"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in one file and in several."""
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    for more in ({}, {"split_max_tensors": 7, "small_first_shard": True}):
        writer = writer_of(folder / "m.gguf", model, **more)
        add_weights(writer, model, lambda name: Type.Q4_K if "attn" in name else Type.Q8_0)
        finish(writer)
    assert part(folder, PARTS).exists()
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


@pytest.mark.parametrize("given", [1, 3])
def test_they_are_read_as_one(given: int, written: Path) -> None:
    whole, parts = (GgufCheckpoint(str(p)) for p in (written / "m.gguf", part(written, given)))
    assert parts.weights == whole.weights
    for name, weight in whole.weights.items():
        if weight.is_quantised:
            found, wanted = parts.read_quantised(name), whole.read_quantised(name)
            assert torch.equal(found[:].dequantised(), wanted[:].dequantised())
        else:
            assert torch.equal(parts.read(name), whole.read(name))


def test_they_are_served(written: Path) -> None:
    params, texts = SamplingParams(temperature=0, max_tokens=8), []
    for path in (written / "m.gguf", part(written, 1)):
        with LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes="4MiB") as llm:
            (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["other", "m-00001-of-00000", "m-00005-of-00004"])
def test_a_part_of_another_name_is_told_its_own(name: str, folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"part 2 of 4 .* NAME-00002-of-00004\.gguf"):
        read_header(str(shutil.copy(part(folder, 2), folder / f"{name}.gguf")))


def test_a_missing_part_is_named(folder: Path) -> None:
    part(folder, 3).unlink()
    with pytest.raises(UnsupportedModelError, match=r"m-00003-of-00004\.gguf"):
        read_header(str(part(folder, 1)))


def test_a_damaged_part_is_named(folder: Path) -> None:
    data = part(folder, 2).read_bytes()
    part(folder, 2).write_bytes(data[:-4096])
    with pytest.raises(UnsupportedModelError, match=r"m-00002-of-00004\.gguf.*damaged"):
        read_header(str(part(folder, 1)))


def test_a_part_in_the_place_of_another_is_refused(folder: Path) -> None:
    shutil.copy(part(folder, 2), part(folder, 3))
    with pytest.raises(UnsupportedModelError, match=r"m-00003-of-00004\.gguf' is part 2 of 4"):
        read_header(str(part(folder, 1)))


def write_two(folder: Path, names: tuple[str, str], total: int) -> str:
    """Two parts, each of one tensor."""
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(part(folder, number + 1, 2), "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", total)
        writer.add_tensor(name, torch.zeros(1, 32).numpy())
        finish(writer)
    return str(part(folder, 1, 2))


def test_parts_of_too_few_tensors_or_of_one_twice_are_refused(tmp_path: Path) -> None:
    assert set(read_header(write_two(tmp_path, ("a", "b"), 2)).tensors) == {"a", "b"}
    with pytest.raises(UnsupportedModelError, match="2 tensors, and should have 3"):
        read_header(write_two(tmp_path, ("a", "b"), 3))
    with pytest.raises(UnsupportedModelError, match="have a twice"):
        read_header(write_two(tmp_path, ("a", "a"), 2))
