"""Engines with quantised KV say what transformers say with a cache of the same bytes, whatever
happens to a request."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.attention.kv_format import KVFormat
from flexinfer.config import EngineConfig
from helpers import engine_kit
from helpers.engine_kit import drain, submit
from helpers.tiny_models import make_model, random_prompts

NUM_NEW = 16
LENGTHS = (60, 35, 70, 21, 48)


class QuantisedCache(tf.DynamicCache):
    """transformers' cache, of what the bytes stand for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._format = KVFormat(name, torch.float32)

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key = self._format.dequantise_keys(self._format.quantise_keys(key))
        value = self._format.dequantise(self._format.quantise(value))
        return super().update(key, value, *args, **kwargs)


@cache
def reference(name: str, kv_dtype: str, prompt: tuple[int, ...]) -> list[int]:
    output = make_model(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        past_key_values=QuantisedCache(kv_dtype),
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def make_engine(name: str, kv_dtype: str, **settings: Any) -> LLMEngine:
    defaults = {"kv_cache_memory_bytes": 8 << 20, "kv_cache_dtype": kv_dtype}
    return engine_kit.make_engine(name, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("name", "kv_dtype", "seed"),
    [
        ("llama", "int8", 0),
        ("llama", "int8", 1),
        ("llama", "fp8_e4m3", 1),
        ("gemma2", "int8", 1),
        ("mistral", "fp8_e4m3", 0),
        ("gpt_oss", "int8", 0),
    ],
)
def test_tokens_are_those_of_a_cache_of_the_same_bytes(name: str, kv_dtype: str, seed: int) -> None:
    """Prefix cache on or off, preempted by either means, chunked, behind windows, with sinks."""
    rng = random.Random(f"{name} {kv_dtype} {seed}")
    engine = make_engine(
        name,
        kv_dtype,
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_space="8MiB",
        max_num_batched_tokens=rng.choice([7, 32, 128]),
        enable_prefix_caching=seed > 0,
        layers_per_plane=rng.choice([None, 1]),
        attention_backend=rng.choice(["host", "host", "sdpa"]),
    )
    prompts = random_prompts(LENGTHS, seed=seed)
    prompts[2][:50] = prompts[0][:50]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    final = drain(engine, rng)
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference(name, kv_dtype, tuple(prompt))
    engine.close()


def test_forks_a_truncated_proposal_and_a_turn_that_goes_on_see_the_same_kv() -> None:
    prompt = [*range(40), *range(40)]
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=12)
    with LLM(make_model("llama"), kv_cache_dtype="int8", skip_tokenizer_init=True) as llm:
        llm.generate({"prompt_token_ids": prompt[:50]}, params, use_tqdm=False)
        forked = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs
        for i, sample in enumerate(forked):
            alone = SamplingParams(temperature=1, seed=5 + i, max_tokens=12)
            (output,) = llm.generate({"prompt_token_ids": prompt}, alone, use_tqdm=False)
            assert output.outputs[0].token_ids == sample.token_ids
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    engine = make_engine("llama", "int8", speculative_config=config)
    submit(engine, [prompt], greedy)
    assert drain(engine)["0"].outputs[0].token_ids == reference("llama", "int8", tuple(prompt))
    engine.close()


def test_sleep_and_wake_keep_quantised_kv() -> None:
    prompt = random_prompts((40,))[0]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    with LLM(make_model("llama"), kv_cache_dtype="int8", skip_tokenizer_init=True) as llm:
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert output.num_cached_tokens == len(prompt) - 1
    assert output.outputs[0].token_ids == reference("llama", "int8", tuple(prompt))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_the_manager_counts_the_bytes_that_there_are(kv_dtype: str) -> None:
    """4 layers, K and V of 2 heads of 16: a byte a number and 4 of a scale."""
    engine = make_engine("llama", kv_dtype)
    assert engine.manager.spec.bytes_per_token == 4 * 2 * 2 * (16 + 4)
    assert engine.manager.bytes_for(4096 // 320) == 4096
    submit(engine, [[1] * 40], SamplingParams(temperature=0, max_tokens=1))
    drain(engine)
    assert engine.manager.stats().resident_bytes >= 40 * 320
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype must be one of 'auto', 'int8', 'fp8_e4m3', 'fp8', got 'fp8_e5m2'",
        ),
        ({"kv_cache_dtype": ["int8"]}, r"kv_cache_dtype must be one of .*, got \['int8'\]"),
    ],
)
def test_a_format_that_there_is_not_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("folder", **settings)


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_vllms_short_name_of_fp8_is_known(asked: str) -> None:
    assert EngineConfig("folder", kv_cache_dtype=asked).kv_cache_dtype == "fp8_e4m3"


def test_gpus_and_latents_are_refused_before_any_weight_is_read(tmp_path: Any) -> None:
    from flexinfer.memory.kv_groups import check_kv_dtype

    llama = make_model("llama").config
    with pytest.raises(ValueError, match="'int8' is for the CPU alone: no kernel here reads it"):
        check_kv_dtype(EngineConfig("folder", kv_cache_dtype="int8", device="cuda:0"), llama)
    tf.DeepseekV3Config(num_hidden_layers=1).save_pretrained(tmp_path)  # no weights at all
    with pytest.raises(ValueError, match=r"'deepseek_v3': it keeps latents \(MLA\)"):
        LLM(str(tmp_path), kv_cache_dtype="int8", skip_tokenizer_init=True, device="cpu")


def test_latents_are_refused_where_layers_differ_in_them() -> None:
    from flexinfer.memory.kv_groups import check_kv_dtype

    config = tf.Dots3NoteTextConfig()
    assert config.is_heterogeneous
    with pytest.raises(ValueError, match=r"'dots3_note_text': it keeps latents \(MLA\)"):
        check_kv_dtype(EngineConfig("folder", kv_cache_dtype="int8"), config)


def test_a_model_that_selects_keys_by_an_index_is_refused() -> None:
    from flexinfer.memory.kv_groups import kv_spec
    from flexinfer.models.describe import describe

    indexed = replace(describe(make_model("llama"), "chosen"), is_indexed=True)
    with pytest.raises(ValueError, match="'int8' is not for chosen: its latents or the keys"):
        kv_spec(indexed, 64, None, "int8")
