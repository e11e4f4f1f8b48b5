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
from flexinfer.models.loading import load_model, resolve_config
resolve_config(sys.argv[1])
import transformers.models.llama.modeling_llama

def kib(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1])

before = kib("VmRSS")
loaded = load_model(sys.argv[1])
print(json.dumps({"peak": kib("VmHWM") - before, "after": kib("VmRSS") - before}))
"""


def write_large(path: Path) -> int:
    """A file of Q8_0; returns the bytes of its layers. All rows are the same: nobody computes."""
    config = tf.LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
    )
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
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
    path = tmp_path / "model.gguf"
    size = write_large(path)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True
    )
    kib = json.loads(result.stdout.splitlines()[-1])
    # A layer: its integers, its bfloat16 numbers, and those once more, joined for the trial.
    layer = LAYER_WEIGHTS * (1 + 2 + 2)
    assert kib["peak"] * 1024 < size + layer + SLACK_BYTES
    assert kib["after"] * 1024 < size + SLACK_BYTES
