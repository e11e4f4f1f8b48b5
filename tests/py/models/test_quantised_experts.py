"""Mixtures of experts with quantised weights: what they answer, what they hold, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from safetensors.torch import load_file, save_file

from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import Experts
from flexinfer.layers.quantised import Scheme
from flexinfer.models.loading import load_model
from helpers.mixtures import COMMON, CONFIGS, generate
from helpers.slow_products import BY_ROUNDING, furthest_behind, slow_model
from helpers.tiny_models import draw_model, random_prompts


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-zp", "int4-a8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_that_of_slow_products_of_the_same_integers(
    name: str, scheme: str, tmp_path: Path
) -> None:
    model = draw_model(CONFIGS[name]())
    model.save_pretrained(tmp_path)
    parsed = Scheme.parse(scheme)
    slow = slow_model(model, parsed)
    # A rounded input may also choose another expert, and such prompts are no test.
    prompts = random_prompts((5, 17, 40), seed=4)
    answers = generate(tmp_path, prompts, quantization=scheme)
    for prompt, generated in zip(prompts, answers, strict=True):
        behind = furthest_behind(slow, prompt, generated)
        assert behind <= (BY_ROUNDING if parsed.byte_inputs else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_and_all_linear_layers_are_quantised(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    draw_model(config).save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), dtype="float32", quantization="int4").model
    kept = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    routers = [f"model.layers.{layer}.router.proj" for layer in (0, 1)]
    assert kept == ({*routers} if name == "gemma4_text" else set())
    assert not any(parameter.is_meta for parameter in model.parameters())
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(experts) == (1 if name == "qwen2_moe" else 2)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    num_weights = 2 if name == "nemotron_h" else 3
    numbers = experts[0].num_experts * num_weights * width * config.hidden_size
    biases = 0 if name != "gpt_oss" else experts[0].num_experts * (2 * width + config.hidden_size)
    assert experts[0].nbytes == numbers // 2 + numbers // 32 * 2 + biases * 4


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_lie_in_one_tensor_are_read_too(name: str, tmp_path: Path) -> None:
    """As transformers may write them."""
    model = draw_model(CONFIGS[name]())
    model.save_pretrained(tmp_path / "apart")
    model.config.save_pretrained(tmp_path / "joined")
    state = {key: weight.contiguous() for key, weight in model.state_dict().items()}
    save_file(state, tmp_path / "joined" / "model.safetensors", {"format": "pt"})
    prompts = random_prompts((20,))
    apart, joined = (
        generate(tmp_path / f, prompts, quantization="int4") for f in ("apart", "joined")
    )
    assert apart == joined


def test_a_folder_with_more_tensors_than_the_model_has_is_read_by_transformers(
    tmp_path: Path,
) -> None:
    draw_model(CONFIGS["qwen3_moe"]()).save_pretrained(tmp_path)
    prompts = random_prompts((20,))
    expected = generate(tmp_path, prompts, quantization="int4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert generate(tmp_path, prompts, quantization="int4") == expected


def test_other_experts_stay_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tf.Llama4TextConfig(
        **COMMON, num_local_experts=4, head_dim=16, intermediate_size_mlp=96, moe_layers=[0, 1]
    )
    draw_model(config).save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), dtype="float32", quantization="int8").model
    assert type(model.model.layers[0].feed_forward.experts).__name__ == "Llama4TextExperts"
    assert "Llama4TextExperts" in caplog.text
    assert "stay as they are" in caplog.text


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("int4-g64", r"experts\.down_proj has 32 inputs, which is no multiple of 64"),
        ("int4-g128", r"has 64 inputs, which is no multiple of 128"),
    ],
)
def test_groups_that_do_not_fit_are_refused_before_any_weight_is_read(
    scheme: str, message: str, tmp_path: Path
) -> None:
    CONFIGS["qwen3_moe"]().save_pretrained(tmp_path)  # no weights at all
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path), dtype="float32", quantization=scheme)


LOAD = """
import json, sys
import torch
from flexinfer.models.loading import load_model
from flexinfer.runtime import library_pages

library_pages.let_go_of_library_pages = lambda: None  # or they would come again, and count

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

torch.set_num_threads(2)
load_model(sys.argv[1], dtype="bfloat16", quantization="int4")  # imports, thread pools
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
kept = load_model(sys.argv[2], dtype="bfloat16", quantization="int4")
print(json.dumps({"peak": resident("VmHWM") - before, "after": resident("VmRSS") - before}))
"""
WIDTH, HIDDEN, NUM_EXPERTS = 512, 512, 64
SLACK_BYTES = 56 << 20
"""What one expert takes while it is quantised; what Python and malloc keep."""


def wide(name: str, num_layers: int) -> Any:
    """Of Qwen3-MoE experts lie one by one in a folder, of gpt-oss all of a layer in one tensor."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": num_layers, "head_dim": 64}
    if name == "gpt_oss":
        sizes["intermediate_size"] = HIDDEN
        return tf.GptOssConfig(
            **{**COMMON, **sizes}, num_local_experts=NUM_EXPERTS, rope_scaling=None
        )
    return tf.Qwen3MoeConfig(
        **{**COMMON, **sizes}, moe_intermediate_size=HIDDEN, num_experts=NUM_EXPERTS
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_are_read_and_quantised_one_by_one(kind: str, tmp_path: Path) -> None:
    num_layers = 6
    for name, layers in (("small", 1), ("large", num_layers)):
        model = tf.AutoModelForCausalLM.from_config(wide(kind, layers), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        del model
    command = [sys.executable, "-c", LOAD, str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    kib = json.loads(result.stdout.splitlines()[-1])
    layer = NUM_EXPERTS * 3 * WIDTH * HIDDEN
    quantised = num_layers * layer * 4.5 / 8
    print(kib, quantised / 1024, layer * 2 / 1024)
    assert kib["after"] * 1024 < quantised + SLACK_BYTES
    assert kib["peak"] * 1024 < quantised + SLACK_BYTES
    assert num_layers * layer * 2 > 2 * (quantised + SLACK_BYTES)  # what transformers would hold
