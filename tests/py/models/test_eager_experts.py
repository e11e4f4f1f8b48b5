"""Mixtures of experts of sizes that torch's grouped product refuses are served all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from flexinfer.models.eager_experts import use_eager_experts
from helpers.mixtures import COMMON
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

NUM_NEW = 8
ODD: dict[str, Any] = {
    "inner": lambda: tf.MixtralConfig(**COMMON | {"intermediate_size": 21}, num_local_experts=4),
    "outer": lambda: tf.Qwen3MoeConfig(
        **COMMON | {"hidden_size": 42}, head_dim=16, moe_intermediate_size=32, num_experts=4
    ),
    "transposed": lambda: tf.GptOssConfig(
        **COMMON | {"intermediate_size": 21}, head_dim=16, num_local_experts=4
    ),
}


@pytest.mark.parametrize("source", ["handed over", "from a folder"])
@pytest.mark.parametrize("name", ODD)
def test_tokens_are_those_of_eager_experts(name: str, source: str, tmp_path: Path) -> None:
    own = draw_model(ODD[name]())
    prompts = random_prompts((1, 9, 33))
    own.set_experts_implementation("eager")
    expected = [continue_prompt(own, tuple(prompt), NUM_NEW) for prompt in prompts]
    own.set_experts_implementation("grouped_mm")
    with pytest.raises(RuntimeError, match="16 bytes"):
        continue_prompt(own, tuple(prompts[1]), 1)
    own.save_pretrained(tmp_path)
    model = own if source == "handed over" else str(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(model, skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        (torch.float32, 20, "grouped_mm"),
        (torch.bfloat16, 20, "eager"),
        (torch.bfloat16, 24, "grouped_mm"),
        (torch.float32, 21, "eager"),
    ],
)
def test_only_rows_that_are_no_multiple_of_16_bytes_are_odd(
    dtype: torch.dtype, width: int, expected: str
) -> None:
    config = tf.MixtralConfig(**COMMON | {"intermediate_size": width}, num_local_experts=4)
    model = draw_model(config).to(dtype)
    use_eager_experts(model)
    assert config._experts_implementation == expected
    with torch.inference_mode():
        assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_what_is_no_graph_is_not_compiled() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no multiple of 16 bytes.* without compile"):
        LLM(draw_model(ODD["inner"]()), skip_tokenizer_init=True, compile=True)


def test_who_has_chosen_another_way_keeps_it() -> None:
    model = draw_model(ODD["inner"]())
    model.set_experts_implementation("batched_mm")
    use_eager_experts(model)
    assert model.config._experts_implementation == "batched_mm"
