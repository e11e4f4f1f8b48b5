"""What a process holds beside weights and KV, and what it has imported, once it serves a quantised
model: a new import or a larger scratch shows here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

HAS_CUDA = torch.version.cuda is not None
# PyPI's build of torch, with CUDA, loads some 150 MiB more, and Triton, wherever it runs. Pages of
# libraries, 25 MiB and the system's to take, are 85 right after pip has written them: Linux 6.18
# keeps what is written in larger pieces, and maps these whole.
MAX_OWN_MIB = 495 if HAS_CUDA else 325
MAX_FILES_MIB = 100
NEEDLESS = (
    *("torch._inductor.compile_fx", "torch.utils.cpp_extension", "torchvision"),
    *("ray", "zmq", "peft", "gguf", "fastapi", "uvicorn", "openai", "anthropic", "matplotlib"),
    *("xgrammar", "llguidance", "sklearn", "pandas"),  # scipy is loaded by transformers itself
    *(() if HAS_CUDA else ("triton",)),
)
SERVE = """
import json, sys
from pathlib import Path
from flexinfer import LLM, SamplingParams

folder, dtype = sys.argv[1:]
llm = LLM(
    folder, quantization="int8", dtype=dtype, skip_tokenizer_init=True, max_model_len=1024,
    enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, threads=1,
)
weights = sum(getattr(module, "nbytes", 0) for module in llm.llm_engine.loaded.model.modules())

def held(num_prompt, num_new):
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    prompt = {"prompt_token_ids": [5 + i % 100 for i in range(num_prompt)]}
    llm.generate([prompt], params, use_tqdm=False)
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    # KV is shared memory.
    return int(sizes["RssAnon"]) / 1024 - weights / 2**20, int(sizes["RssFile"]) / 1024

stages = [held(1, 16), held(512, 4)]
print(json.dumps({"stages": stages, "modules": list(sys.modules)}))
"""


def test_a_quantised_model_is_served_in_little_memory_beside_its_weights(tmp_path: Path) -> None:
    """An MLP as wide as that of a model of 1B: its activations count."""
    config = tf.LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=8,
        eos_token_id=None,
    )
    tf.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    command = [sys.executable, "-c", SERVE, str(tmp_path), "bfloat16"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found["modules"]) & set(NEEDLESS) == set()
    for own, of_files in found["stages"]:
        assert own < MAX_OWN_MIB
        assert of_files < MAX_FILES_MIB
