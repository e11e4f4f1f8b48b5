"""A safetensors file is let go of when little of it is used, and the weights stay the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from flexinfer.runtime import weight_files
from flexinfer.runtime.weight_files import (
    DropBehind,
    converting_one_by_one,
    drop_pages,
    let_go_of_files,
)
from helpers.tiny_models import CONFIGS, make_model

WIDTH = 256


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


def load(file: Path, names: list[str]) -> torch.nn.Module:
    """A model of views of the file."""
    weights = {str(i): torch.randn(WIDTH, WIDTH) for i in range(4)}
    save_file(weights, file)
    model = torch.nn.Module()
    with safe_open(file, framework="pt") as opened:
        for name in names:
            weight = opened.get_tensor(name)
            assert torch.equal(weight, weights[name])
            model.register_parameter(f"w{name}", torch.nn.Parameter(weight, requires_grad=False))
    return model


@pytest.mark.parametrize(("num_left", "stays"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_file_is_let_go_of_when_half_of_it_is_unused(
    tmp_path: Path, num_left: int, stays: bool
) -> None:
    file = tmp_path / "model.safetensors"
    model = load(file, ["0", "1", "2", "3"])
    for name in ["3", "2", "1", "0"][: 4 - num_left]:
        delattr(model, f"w{name}")
    expected = [parameter.clone() for parameter in model.parameters()]
    assert is_mapped(file)
    copied_bytes = let_go_of_files(model)
    assert is_mapped(file) == stays
    assert copied_bytes == (0 if stays else num_left * WIDTH * WIDTH * 4)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = load(file, ["0"])
    model.tied = torch.nn.Parameter(model.w0.detach(), requires_grad=False)
    let_go_of_files(model)
    assert not is_mapped(file)
    assert model.tied.data_ptr() == model.w0.data_ptr()


def resident_kib(file: Path) -> int:
    """Of the mapping of this file in this process."""
    entry, rss = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            entry = line.endswith(str(file))
        elif entry and line.startswith("Rss:"):
            rss += int(line.split()[1])
    return rss


def test_dropped_pages_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = load(file, ["0", "1", "2", "3"])
    expected = [parameter.clone() for parameter in model.parameters()]
    before_kib = resident_kib(file)
    own = torch.ones(WIDTH, WIDTH)
    dropped_bytes = drop_pages([model.w1, own, torch.empty(0)])
    assert WIDTH * WIDTH * 4 - 2 * 4096 <= dropped_bytes <= WIDTH * WIDTH * 4
    assert resident_kib(file) == before_kib - dropped_bytes // 1024
    assert torch.equal(own, torch.ones(WIDTH, WIDTH))
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_converted_one_by_one_a_model_is_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    make_model(name).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    monkeypatch.setattr(weight_files, "CONVERTED_BYTES", 1)
    with converting_one_by_one():
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = tensors_of(expected)
    assert tensors_of(found).keys() == wanted.keys()
    for key, tensor in tensors_of(found).items():
        assert tensor.dtype == wanted[key].dtype, key
        assert torch.equal(tensor, wanted[key]), key


def test_tied_weights_are_converted_once(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with converting_one_by_one():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_file_that_is_converted_is_never_held_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS["llama"]()
    config.intermediate_size = 4096  # 1 MiB a weight, three a layer
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    monkeypatch.setattr(weight_files, "CONVERTED_BYTES", 2 << 20)
    held_kib: list[int] = []
    drop = DropBehind._drop

    def watched(mode: DropBehind) -> None:
        held_kib.append(resident_kib(file))
        drop(mode)

    monkeypatch.setattr(DropBehind, "_drop", watched)
    with converting_one_by_one():
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert file.stat().st_size > 12 << 20
    assert len(held_kib) >= 5
    assert 0 < max(held_kib) <= 4 << 10, held_kib


def test_the_users_choice_of_threads_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weight_files.NO_THREADS, "0")
    with converting_one_by_one():
        assert os.environ[weight_files.NO_THREADS] == "1"
    assert os.environ[weight_files.NO_THREADS] == "0"
    monkeypatch.delenv(weight_files.NO_THREADS)
    with converting_one_by_one():
        pass
    assert weight_files.NO_THREADS not in os.environ
