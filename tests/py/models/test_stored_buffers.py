"""What folders have beside parameters where their weights are read one by one: buffers that are
read, and layers that are passed over as in transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import open_checkpoint
from flexinfer.models.stored import open_stored
from helpers.float_folders import FP4_CASES, SCALED_CASES
from helpers.mixtures import COMMON, NUM_TOKENS, generate
from helpers.packed_folders import edit, write_experts
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

ROUTED: dict[str, Any] = {
    **COMMON,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
CONFIGS: dict[str, Any] = {
    "deepseek_v3": lambda: tf.DeepseekV3Config(**ROUTED | LATENT),
    "glm4_moe": lambda: tf.Glm4MoeConfig(**ROUTED, head_dim=16),
}
CASES = {"fp8": SCALED_CASES["fp8"], "nvfp4": FP4_CASES["nvfp4"]}
NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
CORRECTION = (0.0, -2.0, 1.0, 0.5)
"""Experts 2 and 3, whatever the scores, which lie between 0 and 1."""


def write(folder: Path, name: str, case: str) -> Any:
    model = draw_model(CONFIGS[name]())
    model.get_buffer(NAME).copy_(torch.tensor(CORRECTION))
    return write_experts(folder, model, *CASES[case])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_a_router_that_is_corrected(
    name: str, case: str, tmp_path: Path
) -> None:
    written = write(tmp_path, name, case)
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected
    written.get_buffer(NAME).zero_()
    without = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert expected != without


@pytest.mark.parametrize("name", CONFIGS)
def test_a_correction_stays_float32(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "fp8")
    correction = torch.tensor([1 + 2**-20, 0, 0, 0])
    edit(tmp_path, lambda tensors: tensors.update({NAME: correction}))
    config = load_config(str(tmp_path))
    checkpoint = open_checkpoint(str(tmp_path), config)
    assert checkpoint is not None
    stored = open_stored(checkpoint, config, torch.bfloat16)
    stored.fill("model.layers.1")
    assert torch.equal(stored.model.get_buffer(NAME), correction)


def test_a_buffer_that_lacks_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe", "fp8")
    edit(tmp_path, lambda tensors: tensors.pop(NAME))
    with pytest.raises(UnsupportedModelError, match=f"lacks {re.escape(NAME)}"):
        load_model(str(tmp_path))


def test_a_buffer_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe", "fp8")
    edit(tmp_path, lambda tensors: tensors.update({NAME: torch.zeros(5)}))
    with pytest.raises(
        UnsupportedModelError, match=rf"{re.escape(NAME)} is \[5\] in the checkpoint"
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("name", "layer"), [("deepseek_v3", 61), ("glm4_moe", 46)])
def test_layers_beyond_the_models_are_passed_over_as_in_transformers(
    name: str, layer: int, tmp_path: Path
) -> None:
    """They predict tokens beyond the next."""
    write(tmp_path, name, "fp8")

    def add(tensors: dict[str, Any], beyond: int) -> None:
        own = [n for n in tensors if n.startswith("model.layers.1.")]
        for n in own:
            tensors[n.replace("layers.1.", f"layers.{beyond}.")] = tensors[n].clone()

    edit(tmp_path, lambda tensors: add(tensors, layer))
    load_model(str(tmp_path))
    edit(tmp_path, lambda tensors: add(tensors, 7))
    with pytest.raises(UnsupportedModelError, match=r"has model\.layers\.7\."):
        load_model(str(tmp_path))
