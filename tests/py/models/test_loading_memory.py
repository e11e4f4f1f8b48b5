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

from helpers.gguf_files import Type, finish, writer_of

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
small, large = sys.argv[1:]
load_model(small)  # what is loaded of libraries only then

def kib(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1])

open("/proc/self/clear_refs", "w").write("5")  # the peak is of what follows
before = kib("VmRSS")
loaded = load_model(large)
print(json.dumps({"peak": kib("VmHWM") - before, "after": kib("VmRSS") - before}))
"""


def write(path: Path, num_layers: int) -> int:
    """A file of Q8_0; returns the bytes of its layers. All rows are the same: nobody computes."""
    config = tf.LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
    )
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
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


def test_a_quantised_file_is_read_a_layer_at_a_time(tmp_path: Path) -> None:
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write(small, 1)
    size = write(large, NUM_LAYERS)
    command = [sys.executable, "-c", LOAD, str(small), str(large)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    kib = json.loads(result.stdout.splitlines()[-1])
    # A layer: its integers, its bfloat16 numbers, and those once more, joined for the trial.
    layer = LAYER_WEIGHTS * (1 + 2 + 2)
    assert kib["peak"] * 1024 < size + layer + SLACK_BYTES
    assert kib["after"] * 1024 < size + SLACK_BYTES
