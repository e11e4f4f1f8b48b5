"""Loading holds the model in its last form and one layer, whatever the file's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

import numpy as np
import transformers as tf
from safetensors.torch import save_file

from helpers.float_folders import FP8
from helpers.gguf.files import Type, finish, writer_of

NUM_LAYERS, WIDTH, HIDDEN = 6, 1024, 3072
LAYER_WEIGHTS = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN
SLACK_BYTES = 40 << 20
LOAD = """
import json, sys
from flexinfer.runtime.torch_settings import set_up_torch
set_up_torch(1)
from flexinfer.models.loading import load_model
from flexinfer.runtime import library_pages

library_pages.let_go_of_library_pages = lambda: None  # or they would come again, and count
small, large, quantization = sys.argv[1:]
load_model(small, quantization=quantization)  # what is loaded of libraries only then

def kib(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1])

open("/proc/self/clear_refs", "w").write("5")  # the peak is of what follows
before = kib("VmRSS")
loaded = load_model(large, quantization=quantization)
print(json.dumps({"peak": kib("VmHWM") - before, "after": kib("VmRSS") - before}))
"""


def empty_model(num_layers: int) -> tf.PreTrainedModel:
    config = tf.LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(config)
    return model


def write_fp8(folder: Path, num_layers: int) -> None:
    model, tensors = empty_model(num_layers), {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
            continue
        tensors[name] = torch.full(weight.shape, 0.5).to(torch.float8_e4m3fn)
        grid = [size // 128 for size in weight.shape]
        tensors[f"{name}_scale_inv"] = torch.full(grid, 0.01)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads(model.config.to_json_string())
    text["quantization_config"] = {**FP8, "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(text))


def write(path: Path, num_layers: int) -> int:
    """A file of Q8_0; returns the bytes of its layers. All rows are the same: nobody computes."""
    model = empty_model(num_layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    writer = writer_of(path, model)
    rows = np.asarray(gguf.quants.quantize(np.linspace(-1, 1, HIDDEN, dtype="f"), Type.Q8_0))
    for name, weight in model.state_dict().items():
        own = names.get_name(name, try_suffixes=(".weight",))
        if weight.dim() == 1:
            writer.add_tensor(own, np.ones(WIDTH, dtype="f"))
            continue
        outputs, inputs = weight.shape
        data = np.broadcast_to(rows[: inputs // 32 * 34], (outputs, inputs // 32 * 34))
        writer.add_tensor(own, np.ascontiguousarray(data), raw_dtype=Type.Q8_0)
    finish(writer)
    return path.stat().st_size


def loaded_kib(small: Path, large: Path, quantization: str) -> dict[str, int]:
    """Of the second one: the most that its loading held, and what is held after it."""
    command = [sys.executable, "-c", LOAD, str(small), str(large), quantization]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    kib: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return kib


@pytest.mark.parametrize(("quantization", "bytes_a_weight"), [("auto", 2), ("int4", 4.5 / 8)])
def test_a_folder_in_fp8_is_read_a_layer_at_a_time(
    quantization: str, bytes_a_weight: float, tmp_path: Path
) -> None:
    write_fp8(tmp_path / "small", 1)
    write_fp8(tmp_path / "large", 2 * NUM_LAYERS)
    kib = loaded_kib(tmp_path / "small", tmp_path / "large", quantization)
    size = 2 * NUM_LAYERS * LAYER_WEIGHTS * bytes_a_weight
    # A layer: its bfloat16 numbers, those joined for the trial, and a matrix of fp8 and float32.
    layer = LAYER_WEIGHTS * (2 + 2) + WIDTH * HIDDEN * (1 + 4)
    assert kib["peak"] * 1024 < size + layer + SLACK_BYTES
    assert kib["after"] * 1024 < size + SLACK_BYTES


def test_a_quantised_file_is_read_a_layer_at_a_time(tmp_path: Path) -> None:
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write(small, 1)
    size = write(large, NUM_LAYERS)
    kib = loaded_kib(small, large, "auto")
    # A layer: its integers, its bfloat16 numbers, and those once more, joined for the trial.
    layer = LAYER_WEIGHTS * (1 + 2 + 2)
    assert kib["peak"] * 1024 < size + layer + SLACK_BYTES
    assert kib["after"] * 1024 < size + SLACK_BYTES
