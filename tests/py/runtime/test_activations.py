"""runtime/activations.py: tensors as torch's, and memory that serves again."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flexinfer.runtime.activations import ALIGNMENT, LARGE_BYTES, empty_activation

LAYERS = """
import re
from pathlib import Path
from flexinfer.runtime.torch_settings import set_up_torch

set_up_torch(1)
import torch
from flexinfer.runtime.activations import empty_activation

def resident_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def made(columns, rows=512):
    return empty_activation((rows, columns), torch.bfloat16).zero_()

def layer(x):
    normed = made(2048)
    qkv = made(3072)
    del normed
    attended, heads = made(2048), made(512)
    del qkv
    x = made(2048)
    del attended, heads
    normed, output = made(2048), made(2048)
    for rows in (240, 240, 32):
        gates = made(16384, rows)
        hidden = made(8192, rows)
        del gates
        block = made(2048, rows)
        del hidden, block
    return output

before = resident_mib()
for _ in range(3):
    x = made(2048)
    for _ in range(8):
        x = layer(x)
    del x
print(resident_mib() - before)
"""
"""The numbers that a prefill of 512 tokens makes in a model 2,048 wide, in their order: 19 MiB at
most at once."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, LARGE_BYTES // 64])
def test_shape_dtype_and_alignment_are_as_of_torch(rows: int, dtype: torch.dtype) -> None:
    made = empty_activation((1, rows, 48), dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((1, rows, 48), dtype, True)
    assert made.data_ptr() % ALIGNMENT == 0


def test_what_a_layer_drops_serves_the_next_one() -> None:
    command = [sys.executable, "-c", LAYERS]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 22
