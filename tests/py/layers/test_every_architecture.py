"""In each architecture of transformers, fused layers give what the layers before them gave."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from flexinfer.layers.fuse import fuse_layers
from helpers.every_architecture import MODEL_TYPES, tiny_model_or_skip
from helpers.tiny_models import random_prompts

# What transformers 5.23 has; newer architectures are tested, too, and may have any of these.
WHOLE_LAYERS = frozenset(
    [
        "arcee",
        "aria_text",
        "cwm",
        "dots1",
        "exaone_moe",
        "gemma",
        "got_ocr2",
        "gpt_oss",
        "hy_v3",
        "internlm3",
        "iquestcoder",
        "jais2",
        "llama",
        "mellum",
        "ministral",
        "mistral",
        "mixtral",
        "moss_transcribe_diarize",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
    ]
)
SANDWICHES = frozenset(["gemma2", "gemma3", "gemma3_text"])
WIDE_NORMS = frozenset(["gemma3n_text", "gemma4_text", "qwen3_next", "qwen3_5_text"])
ATTENTION = frozenset(
    [
        "apertus",
        "exaone4",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "hyperclovax",
        "kolibri1",
        "vaultgemma",
    ]
)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_are_the_same(model_type: str) -> None:
    """More rows than those of a decode step, and numbers that reach what only large ones reach."""
    model = tiny_model_or_skip(model_type)
    fused = copy.deepcopy(model)
    counts = Counter(fuse_layers(fused))
    ids = torch.tensor(random_prompts((70,)))
    with torch.inference_mode():
        expected, logits = model(ids).logits, fused(ids).logits
    assert (logits - expected).norm() <= 1e-3 * expected.norm()
    if model_type in WHOLE_LAYERS:
        assert counts["FusedDecoderLayer"] > 0
    if model_type in SANDWICHES:
        assert counts["SandwichLayer"] > 0
    if model_type in WIDE_NORMS:
        assert counts["RMSNorm"] > 0
    if model_type in ATTENTION:
        assert counts["FusedAttention"] > 0


def test_a_clamp_that_is_not_set_is_no_clamp() -> None:
    """OLMo's attention clamps queries, keys and values only if its config says so."""
    model = tiny_model_or_skip("olmo")
    for clip, num_fused in ((2.0, 0), (None, 2)):
        model.config.clip_qkv = clip
        counts = fuse_layers(copy.deepcopy(model))
        assert counts.get("FusedDecoderLayer", 0) == num_fused


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_the_same(model_type: str, tmp_path: Path) -> None:
    """Through the engine: the model of a folder is fused, one that is handed over is not."""
    drawn = tiny_model_or_skip(model_type)
    drawn.save_pretrained(tmp_path)
    # Loading clears what transformers takes for padding, as one of Youtu's words.
    model = type(drawn).from_pretrained(tmp_path, dtype=torch.float32).eval()
    settings: Any = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    answers = []
    for source in (model, str(tmp_path)):
        try:
            with LLM(source, max_num_seqs=4, **settings) as llm:
                outputs = llm.generate(
                    random_prompts((5, 70, 20, 1)),
                    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                    use_tqdm=False,
                )
        except UnsupportedModelError as error:
            pytest.skip(str(error))
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
