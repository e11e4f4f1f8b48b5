"""GGUF files: exactly their numbers, config, tokenizer and template; refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer import LLM, SamplingParams
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.embedding import QuantisedEmbedding
from flexinfer.layers.experts import Experts
from flexinfer.layers.joined_linear import JoinedLinear
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from helpers.gguf.answers import expected
from helpers.gguf.files import (
    Type,
    add_sizes,
    add_tokenizer,
    finish,
    random_blocks,
    write_gguf,
    writer_of,
    writing,
)
from helpers.gguf.form import Form, Parts
from helpers.gguf.forms import FORMS, add_expert_width, experts
from helpers.gguf.models import ALWAYS_TIED, CONFIGS, NEVER_TIED, TYPES, mixed, same
from helpers.mixtures import generate
from helpers.tiny_models import draw_model, make_tokenizer, random_prompts

APART: dict[str, Callable[[str], Type]] = {
    "gates and factors apart": lambda name: Type.Q6_K if "ffn_gate" in name else Type.Q4_0
}


@pytest.mark.parametrize("types", [*TYPES, "gates and factors apart"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3moe"])
def test_greedy_tokens_are_those_of_the_numbers_in_the_file(
    name: str, types: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, draw_model(CONFIGS[name]()), {**TYPES, **APART}[types])
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [(n, t) for n in CONFIGS for t in (False, True) if n not in (ALWAYS_TIED, NEVER_TIED)[t]],
)
def test_each_architecture_is_the_model_that_transformers_has(
    name: str, is_tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS[name](tie_word_embeddings=is_tied))
    written = write_gguf(path, model, same(Type.Q8_0))
    prompts = random_prompts((5, 40))
    assert generate(path, prompts) == expected(written, prompts)


def test_what_is_quantised_stays_so_and_types_are_mixed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["llama"]()), mixed)
    model: Any = load_model(str(path)).model
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj, JoinedLinear)
    assert isinstance(layer.mlp.gate_up_proj, QuantisedLinear)
    assert isinstance(model.lm_head, QuantisedLinear)
    assert isinstance(model.model.embed_tokens, QuantisedEmbedding)
    assert model.dtype == torch.bfloat16
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert max(parameter.dim() for parameter in model.parameters()) == 1


def test_frequencies_that_the_file_stretches(tmp_path: Path) -> None:
    """As Llama 3.1 does: by a tensor of factors."""
    path = tmp_path / "model.gguf"
    model = draw_model(CONFIGS["llama"]())
    factors = torch.linspace(1, 8, 32)
    with writing(path, model, same(Type.Q8_0)) as (writer, written):
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    prompts = random_prompts((40,))
    before = expected(written, prompts)
    written.model.rotary_emb.inv_freq /= factors
    assert expected(written, prompts) != before
    assert generate(path, prompts) == expected(written, prompts)


@pytest.mark.parametrize("kind", [{"rope.scaling.type": "linear"}, {}])
def test_linear_scaling_of_positions(kind: dict[str, str], tmp_path: Path) -> None:
    """A factor alone says it, too."""
    path = tmp_path / "model.gguf"
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = draw_model(CONFIGS["llama"](rope_parameters=rope))
    extra = {**kind, "rope.scaling.factor": 4.0}
    written = write_gguf(path, model, same(Type.Q8_0), extra)
    prompts = random_prompts((40,))
    assert generate(path, prompts) == expected(written, prompts)


def test_a_file_that_is_not_quantised_can_be_at_load(tmp_path: Path) -> None:
    model = draw_model(CONFIGS["llama"]())
    write_gguf(tmp_path / "model.gguf", model, same(Type.F32))
    model.save_pretrained(tmp_path / "folder")
    prompts = random_prompts((5, 40))
    tokens = generate(tmp_path / "model.gguf", prompts, quantization="int4")
    assert tokens == generate(tmp_path / "folder", prompts, quantization="int4")


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3moe"])
def test_tokenizer_and_chat_template_come_from_the_file(name: str, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "model.gguf", make_tokenizer()
    config = CONFIGS[name]()
    config.vocab_size = 270
    model = draw_model(config)
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        add_tokenizer(writer, tokenizer)
    messages = [{"role": "user", "content": "hello world, héllo  1234\n"}]
    with LLM(str(path), max_model_len=128) as llm:
        assert llm.engine.loaded.eos_token_ids == {tokenizer.eos_token_id}
        own = llm.get_tokenizer()
        text = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        output = llm.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False)[0]
    assert text == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert own(text, add_special_tokens=False).input_ids == ids == output.prompt_token_ids
    assert own.decode(ids) == tokenizer.decode(ids)


def write_named(path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    finish(writer)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_named(tmp_path / "model.gguf", "mamba")
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba'; known are llama"):
        load_model(str(tmp_path / "model.gguf"))


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        blocks = np.zeros((128, 292), dtype=np.uint8)
        writer.add_tensor("token_embd_norm.weight", blocks, raw_dtype=Type.Q8_K)
    with pytest.raises(UnsupportedModelError, match=r"'token_embd_norm.*type Q8_K.*Q6_K"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.scaling.type", "longrope"), ("attention.sliding_window", 16.0), ("logit_scale", 2.0)],
)
def test_a_setting_that_is_not_known_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["llama"]()), same(Type.F32), {key: value})
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key}"):
        load_model(str(path))


def write_numbers(path: Path, **numbers: int) -> None:
    """A file with 128 rows of the embedding, and these values."""
    config = CONFIGS["llama"]()
    config.vocab_size = 128
    model = draw_model(config)
    with writing(path, model, same(Type.F32)) as (writer, _):
        for key, value in numbers.items():
            writer.add_uint32(key.replace("__", "."), value)


@pytest.mark.parametrize("size", [127, 129])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(
    size: int, tmp_path: Path
) -> None:
    write_numbers(tmp_path / "model.gguf", llama__vocab_size=size)
    with pytest.raises(UnsupportedModelError, match=rf"vocab_size = {size}; known: only .* 128"):
        load_model(str(tmp_path / "model.gguf"))
    write_numbers(tmp_path / "fits.gguf", llama__vocab_size=128)
    assert load_model(str(tmp_path / "fits.gguf")).vocab_size == 128


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_special_tokens_beyond_the_vocabulary_are_refused(name: str, tmp_path: Path) -> None:
    key = f"tokenizer__ggml__{name}_token_id"
    write_numbers(tmp_path / "model.gguf", **{key: 128})
    with pytest.raises(UnsupportedModelError, match=rf"{name}_token_id = 128, .* has 128 rows"):
        load_model(str(tmp_path / "model.gguf"))
    write_numbers(tmp_path / "fits.gguf", **{key: 127})
    ends = load_model(str(tmp_path / "fits.gguf")).eos_token_ids
    assert ends == ({127} if name.startswith("e") else set())


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    model = draw_model(CONFIGS["llama"]())
    strange = tmp_path / "strange.gguf"
    with writing(strange, model, same(Type.F32)) as (writer, _):
        writer.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy())
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight"):
        load_model(str(strange))
    fewer = copy.deepcopy(model)
    fewer.config.num_hidden_layers = 3
    write_gguf(tmp_path / "fewer.gguf", fewer, same(Type.F32))
    with pytest.raises(UnsupportedModelError, match=r"block_count = 3; known: only .* 2$"):
        load_model(str(tmp_path / "fewer.gguf"))
    wide = copy.deepcopy(model)
    wide.config.intermediate_size = 1024
    write_gguf(tmp_path / "wide.gguf", wide, same(Type.F32))
    with pytest.raises(UnsupportedModelError, match=r"gate_proj\.weight is \[512, 256\] in the"):
        load_model(str(tmp_path / "wide.gguf"))


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_experts_are_quantised_as_in_the_file(name: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS[name]())
    write_gguf(path, model, mixed)
    loaded: Any = load_model(str(path)).model
    experts = loaded.model.layers[1].mlp.experts
    assert isinstance(experts, Experts)
    count, width, hidden = model.model.layers[1].mlp.experts.down_proj.shape
    numbers = count * width * hidden
    # Q4_K has scales and minimums of a byte for 32 inputs, Q6_K scales for 16; of a block 16 bits.
    assert experts.nbytes * 16 == 2 * numbers * 9.25 + numbers * 13.125
    assert not any(parameter.is_meta for parameter in loaded.parameters())


def test_gates_and_factors_of_experts_may_be_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's converter writes them if it is asked to."""

    def joined(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
        if not name.endswith("gate_up_proj"):
            return experts(name, tensor, config)
        return {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": tensor}

    monkeypatch.setitem(FORMS, "qwen3_moe", Form("qwen3moe", add_expert_width, joined))
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["qwen3moe"]())
    written, prompts = write_gguf(path, model, same(Type.Q8_0)), random_prompts((20,))
    assert generate(path, prompts) == expected(written, prompts)


def test_values_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        writer.add_tensor("rope_freqs.weight", torch.ones(7).numpy())
    with pytest.raises(UnsupportedModelError, match=r"F32 \[7\], where the model has 32"):
        load_model(str(path))
    writer = writer_of(path, model, {"attention.head_count_kw": 1.0})
    writer.add_uint32("general.alignment", 0)
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="is a damaged GGUF file"):
        load_model(str(path))


def rename(path: Path, old: str, new: str) -> None:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("mixtral", "blk.1.ffn_up_exps.", "blk.1.ffn_up_exqs.", r"'blk\.1\.ffn_up_exqs\.weight'"),
        ("mixtral", "blk.1.ffn_up_exps.", "blk.5.ffn_up_exps.", "block_count = 2; known: .* 3$"),
        ("mixtral", "llama.expert_used_count", "llama.expert_used_limit", "expert_used_limit"),
        ("qwen3moe", "qwen3moe.expert_count", "qwen3moe.expert_kount", "expert_kount"),
        (
            "qwen3moe",
            "qwen3moe.expert_feed_forward_length",
            "qwen3moe.expert_feed_forward_lengph",
            "expert_feed_forward_lengph",
        ),
    ],
)
def test_experts_that_are_not_known_are_refused_by_name(
    name: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS[name]()), same(Type.Q8_0))
    rename(path, old, new)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(path))


@pytest.mark.parametrize(
    ("architecture", "count", "message"),
    [
        ("qwen3", 4, r"qwen3\.expert_count = 4; known: only models without experts"),
        ("qwen3moe", 0, r"qwen3moe\.expert_count = 0; known: only models with experts"),
        ("llama", 4, r"has no llama\.expert_used_count"),
    ],
)
def test_a_number_of_experts_that_does_not_go_with_the_architecture_is_refused(
    architecture: str, count: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    config = CONFIGS["llama"]()
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, config)
    writer.add_expert_count(count)
    writer.add_tensor("token_embd.weight", torch.zeros(128, 256).numpy())
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(path))


def test_what_is_no_whole_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf' cannot be read"):
        load_model(str(path))
    path.write_bytes(b"PK not this one")
    with pytest.raises(UnsupportedModelError, match="is no GGUF file"):
        load_model(str(path))
    write_gguf(path, draw_model(CONFIGS["llama"]()), same(Type.Q8_0))
    whole = path.read_bytes()
    for size in (10, 100, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(UnsupportedModelError, match="is a damaged GGUF file"):
            load_model(str(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "int8"},
            "quantised already, by 'gguf'.*leave quantization out, or take 'a8' for inputs of 8",
        ),
        ({"quantization": "awq"}, "this model's weights are quantised by 'gguf'"),
        ({"quantization": "a8", "dtype": "float16"}, "float32 or bfloat16, not in torch.float16"),
        ({"quantization": "a8", "device": "cuda"}, "for the CPU alone, not for cuda"),
        ({"dtype": "float16"}, "float32 or bfloat16, not in torch.float16"),
        ({"device": "cuda"}, "for the CPU alone, not for cuda"),
    ],
)
def test_settings_that_do_not_go_with_such_weights(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS["llama"]()), same(Type.Q8_0))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(path), **settings)


def test_a_cut_of_text_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["llama"]())
    with writing(path, model, same(Type.Q8_0)) as (writer, _):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("klingon")
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*Name another tokenizer"):
        LLM(str(path))


def test_random_blocks_are_of_a_sensible_size() -> None:
    for kind in (Type.Q4_K, Type.Q6_K):
        numbers = gguf.quants.dequantize(random_blocks(kind, 16, 512, 0), kind)
        assert 0.02 < numbers.std() < 1
