"""A safetensors file is let go of when little of it is used, and the weights stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open
from safetensors.torch import save_file

from flexinfer.weight_files import drop_pages, let_go_of_files

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
