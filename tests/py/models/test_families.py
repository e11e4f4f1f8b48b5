"""Models whose layers differ say what transformers' `generate` says, however they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from flexinfer import LLM, SamplingParams, UnsupportedModelError
from helpers.engine_kit import preempt_at_step
from helpers.every_architecture import tiny_config
from helpers.families import FAMILIES, continuation, make_family
from helpers.tiny_models import continue_prompt, random_prompts

NUM_NEW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)


def open_llm(name: str, **settings: Any) -> LLM:
    defaults = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 200}
    return LLM(make_family(name), skip_tokenizer_init=True, **{**defaults, **settings})


def mixed_prompts() -> list[list[int]]:
    """From one token to eight windows; two share a head of two windows."""
    prompts = random_prompts((1, 5, 40, 130, 17))
    return [*prompts, prompts[3][:33] + prompts[2][:10]]


def expected(name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [continuation(name, tuple(prompt), NUM_NEW) for prompt in prompts]


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.llm_engine.manager.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("chunk_bytes", "layers_per_plane", "backend"),
    [(4 << 10, 1, "auto"), (64 << 10, None, "sdpa"), (2 << 20, None, "auto")],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batches_and_later_turns(
    name: str, chunk_bytes: int, layers_per_plane: int | None, backend: str
) -> None:
    prompts = mixed_prompts()
    answers = expected(name, prompts)
    assert len({tuple(answer) for answer in answers}) > 1
    with open_llm(
        name,
        chunk_bytes=chunk_bytes,
        layers_per_plane=layers_per_plane,
        attention_backend=backend,
        max_num_batched_tokens=48,
    ) as llm:
        assert generate(llm, prompts) == answers
        turns = [
            prompt + answer + [7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        assert generate(llm, turns) == expected(name, turns)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_prefix_cache(name: str) -> None:
    prompts = mixed_prompts()
    with open_llm(name, enable_prefix_caching=False) as llm:
        assert generate(llm, prompts) == expected(name, prompts)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted(name: str, mode: str) -> None:
    prompts = random_prompts((20, 30, 25, 10, 28))
    with open_llm(name, chunk_bytes=4096) as llm:
        tokens_bytes = 70 * llm.llm_engine.manager.spec.bytes_per_token
    with open_llm(
        name,
        chunk_bytes=4096,
        kv_cache_memory_bytes=tokens_bytes,
        max_model_len=60,
        preemption_mode=mode,
        swap_space=4 * tokens_bytes,
    ) as llm:
        is_indexed = llm.llm_engine.loaded.is_indexed  # two layers: admission alone makes room
        if llm.llm_engine.manager.spec.windows or is_indexed:  # windows give back enough for all
            preempt_at_step(llm.llm_engine, 6)
        assert generate(llm, prompts) == expected(name, prompts)
        assert sum(llm.llm_engine.stats().preemptions[mode].values()) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_forked(name: str) -> None:
    """Beams: the best one by its own model's scores, whose prompts are computed once."""
    prompt = random_prompts((40,))[0]
    params = SamplingParams(n=3, temperature=0, max_tokens=NUM_NEW)
    with open_llm(name, chunk_bytes=4096) as llm:
        outputs = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        llm.llm_engine.manager.check_integrity()
    assert [output.token_ids for output in outputs] == 3 * expected(name, [prompt])


@pytest.mark.parametrize(
    ("name", "numbers_per_token"),
    [
        ("deepseek_v3", 4 * (32 + 16)),  # a latent and a rotary key a layer
        ("gemma3n", 3 * 2 * 2 * 16),  # three of six layers have KV of their own
        ("gemma4", 2 * 2 * 2 * (16 + 32)),  # four of six, in two shapes
        ("mimo_v2", (2 * 4 + 2 * 2) * (48 + 32)),  # windows of four KV heads, the rest of two
    ],
)
def test_what_a_token_takes(name: str, numbers_per_token: int) -> None:
    with open_llm(name) as llm:
        assert llm.llm_engine.manager.spec.bytes_per_token == 4 * numbers_per_token


@pytest.mark.parametrize(
    ("name", "reason"), [("deepseek_v32", "request by request"), ("diffllama", "several times")]
)
def test_what_is_no_graph_is_not_compiled(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*without compile"):
        open_llm(name, compile=True)


def test_outside_of_the_engine_latents_are_expanded_as_before() -> None:
    model = make_family("deepseek_v3")
    ids = torch.tensor(random_prompts((9,)))
    before = model(ids).logits
    with open_llm("deepseek_v3") as llm:
        assert generate(llm, [ids[0].tolist()])
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", ["deepseek_v2", "gemma3n", "gemma4", "mimo_v2"])
def test_a_model_of_a_folder_whose_layers_are_fused(name: str, tmp_path: Path) -> None:
    make_family(name).save_pretrained(tmp_path)
    prompts = mixed_prompts()
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, max_model_len=200
    ) as llm:
        is_latent = {layer.is_latent for layer in llm.llm_engine.loaded.layers}
        assert is_latent == {name == "deepseek_v2"}
        assert generate(llm, prompts) == expected(name, prompts)


def test_the_text_model_of_a_folder_with_a_tower_for_images(tmp_path: Path) -> None:
    """As Llama 3.2 Vision: layers that attend to an image alone are passed over."""
    tower = {"hidden_size": 32, "intermediate_size": 32, "attention_heads": 2}
    tower |= {"num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    config = tf.MllamaConfig(
        vision_config={**tower, "vision_output_dim": 64},
        text_config=tiny_config("mllama").to_dict(),
    )
    torch.manual_seed(0)
    model = tf.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.generation_config.eos_token_id = model.config.text_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    prompts = mixed_prompts()[:4]
    with LLM(
        str(tmp_path), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, max_model_len=200
    ) as llm:
        outputs = generate(llm, prompts)
    assert outputs == [continue_prompt(model, tuple(prompt), NUM_NEW) for prompt in prompts]
