"""A stack gives the logits of its model, and its last layer computes the rows that are wanted."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from flexinfer import LLM, SamplingParams
from flexinfer.attention.base import LayerKV
from flexinfer.attention.hook import use_attention
from flexinfer.attention.host import HostAttention
from flexinfer.attention.sdpa import SdpaAttention
from flexinfer.engine.profile import StepProfiler
from flexinfer.layers import rotary_table
from flexinfer.layers.decoder_stack import find_decoder_stack
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.host_linear import MAX_FEW_ROWS
from flexinfer.layers.mlp import GatedMLP
from flexinfer.layers.rotary_table import RotaryTable, keep_rotary_table
from flexinfer.runner.inputs import InputBuilder
from helpers.every_architecture import MODEL_TYPES, tiny_model_or_skip
from helpers.tiny_models import make_model, random_prompts, reference

STACKS = frozenset(
    [
        "arcee",
        "aria_text",
        "cwm",
        "dots1",
        "got_ocr2",
        "gpt_oss",
        "hy_v3",
        "internlm3",
        "iquestcoder",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "moss_transcribe_diarize",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
    ]
)
"""What transformers 5.23 has; newer architectures may be stacks, too."""


def fused(model_type: str) -> Any:
    model = tiny_model_or_skip(model_type)
    fuse_layers(model)
    return model


def backend_of(model: Any, kind: Any) -> Any:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (2, 256, config.num_key_value_heads, dim)
    layers = [LayerKV(torch.zeros(shape), torch.zeros(shape)) for _ in model.model.layers]
    return kind(layers)


@pytest.mark.parametrize("kind", [HostAttention, SdpaAttention])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_stack_gives_the_logits_of_its_model(model_type: str, kind: Any) -> None:
    model = fused(model_type)
    stack = find_decoder_stack(model)
    if stack is None:
        assert model_type not in STACKS
        return
    inputs = InputBuilder(torch.device("cpu")).build_prompt(1, 70)
    inputs.token_ids.copy_(torch.tensor(random_prompts((70,))[0]))
    rows = torch.tensor([69, 0, 33, 69])
    calls: list[Any] = [
        lambda: model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0],
        lambda: stack.logits(inputs.token_ids, inputs.positions, rows, narrows=False),
        lambda: stack.logits(inputs.token_ids, inputs.positions, rows, narrows=True),
    ]
    outputs = []
    for call in calls:
        backend = backend_of(model, kind)
        with torch.inference_mode(), use_attention(model, backend, inputs.metadata):
            logits = call()
        outputs.append((logits, backend.layers[-1].k.clone(), backend.layers[-1].v.clone()))
    (expected, *stored), whole, narrow = outputs
    assert torch.equal(whole[0], expected)
    torch.testing.assert_close(narrow[0], expected, rtol=1e-4, atol=1e-4)
    for other in (whole, narrow):
        assert all(torch.equal(a, b) for a, b in zip(stored, other[1:], strict=True))
    assert stored[0][1, :70].abs().min() > 0


@given(
    st.lists(st.integers(0, 99), max_size=40),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 100),
)
def test_positions_that_are_looked_up_have_the_same_bits(
    positions: list[int], dtype: Any, max_positions: int
) -> None:
    module = make_model("llama").model.rotary_emb
    table = keep_rotary_table(module, max_positions)
    assert isinstance(table, RotaryTable)
    ids = torch.tensor([positions], dtype=torch.int64)
    x = torch.zeros(1, len(positions), 64, dtype=dtype)
    for found, expected in zip(table(x, ids), module(x, ids), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == dtype


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "some day's"])
def test_frequencies_that_hang_on_positions_are_not_looked_up(
    rope_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_model("llama").model.rotary_emb
    monkeypatch.setattr(module, "rope_type", rope_type)
    assert keep_rotary_table(module, 64) is module


def test_tokens_beyond_the_table_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_table, "MAX_POSITIONS", 8)
    module = make_model("llama").model.rotary_emb
    table = keep_rotary_table(module, 64)
    ids = torch.tensor([[7, 8, 63]])
    x = torch.zeros(1, 3, 64)
    for found, expected in zip(table(x, ids), module(x, ids), strict=True):
        assert torch.equal(found, expected)


PROMPTS = random_prompts((MAX_FEW_ROWS + 20, 7, 130, 60))


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The MLPs that were called, and with how many rows."""
    seen: list[tuple[Any, int]] = []
    forward = GatedMLP.forward

    def counted(self: GatedMLP, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
        seen.append((self, x.shape[-2]))
        return forward(self, x, residual)

    monkeypatch.setattr(GatedMLP, "forward", counted)
    return seen


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 96}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_prefills_compute_one_row_of_it_and_say_the_same(
    name: str, settings: Any, rows_seen: list[tuple[Any, int]], tmp_path: Path
) -> None:
    make_model(name).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as llm:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        layers = llm.llm_engine.loaded.model.model.layers
    expected = [reference(name, tuple(prompt), 8) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    most = [max(rows for mlp, rows in rows_seen if mlp is layer.mlp) for layer in layers]
    assert min(most[:-1]) > MAX_FEW_ROWS
    assert most[-1] <= len(PROMPTS)


def test_scores_of_prompts_ask_for_their_rows(tmp_path: Path) -> None:
    """Some prompts are scored in a step, and others not."""
    make_model("llama").save_pretrained(tmp_path)
    scores = []
    for is_stack in (True, False):
        with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
            if not is_stack:
                llm.llm_engine.runner._stack = None
            params = [
                SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2 if i % 2 else None)
                for i in range(len(PROMPTS))
            ]
            prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        scores.append([(out.outputs[0].token_ids, out.prompt_logprobs) for out in outputs])
    for (tokens, found), (expected_tokens, expected) in zip(*scores, strict=True):
        assert tokens == expected_tokens
        assert (found is None) == (expected is None)
        for of_token, expected_of_token in zip(found or [], expected or [], strict=True):
            if of_token is None:
                assert expected_of_token is None
                continue
            assert of_token.keys() == expected_of_token.keys()
            for token_id, score in of_token.items():
                assert score.logprob == pytest.approx(expected_of_token[token_id].logprob, abs=1e-4)


def test_what_does_more_than_a_stack_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused("llama")
    base = model.model
    assert find_decoder_stack(model) is not None
    layers, norm = base.layers, base.norm
    for name, other in {
        "norm": torch.nn.Identity(),
        "layers": torch.nn.ModuleList([*layers, torch.nn.Identity()]),
    }.items():
        monkeypatch.setattr(base, name, other)
        assert find_decoder_stack(model) is None
        monkeypatch.undo()
        base.layers, base.norm = layers, norm
    monkeypatch.setattr(base, "forward", type(base).forward.__get__(base))
    assert find_decoder_stack(model) is None


def test_a_mixture_that_is_to_tell_how_it_routes_is_none() -> None:
    """Its code for losses then does something."""
    model = fused("qwen3_moe")
    assert find_decoder_stack(model) is not None
    model.config.output_router_logits = True
    assert find_decoder_stack(model) is None


def test_what_is_put_around_its_code_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused("llama")
    for part in (model, model.model):
        forward = type(part).forward

        @wraps(forward)
        def wrapper(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        monkeypatch.setattr(type(part), "forward", wrapper)
        assert find_decoder_stack(model) is None
        monkeypatch.undo()
    assert find_decoder_stack(model) is not None


@pytest.mark.parametrize("part", ["", "model"])
def test_hooks_around_it_are_called(part: str, tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        seen: list[Any] = []
        watched = llm.llm_engine.loaded.model.get_submodule(part)
        watched.register_forward_pre_hook(lambda *call: seen.append(call))
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(seen) >= 8
    expected = [reference("mixtral", tuple(prompt), 8) for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_profile_is_one_of_the_stack(tmp_path: Path) -> None:
    """Its own hooks are in the parts: what is measured is what runs."""
    make_model("mixtral").save_pretrained(tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        stack = llm.llm_engine.runner._stack
        assert stack is not None
        with StepProfiler(llm.llm_engine):
            assert not stack.is_watched


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hidden_states = inputs_embeds", "hidden_states = inputs_embeds * 2.0"),
        ("hidden_states = self.norm(hidden_states)", "hidden_states = hidden_states"),
        ("position_embeddings=position_embeddings", "position_embeddings=None"),
        (
            "position_embeddings=position_embeddings",
            "position_embeddings=position_embeddings[::-1]",
        ),
        ("**kwargs,\n        )\n\n    hid", "**kwargs,\n        ) * 2.0\n\n    hid"),
        (
            "    hidden_states = self.norm",
            "    hidden_states.mul_(2.0)\n    hidden_states = self.norm",
        ),
        (
            "    hidden_states = inputs_embeds",
            "    inputs_embeds *= 2.0\n    hidden_states = inputs_embeds",
        ),
        ("self.layers[: self.config.num_hidden_layers]", "self.layers[:1]"),
        (
            "    hidden_states = self.norm",
            "    hidden_states[..., :8] = 0\n    hidden_states = self.norm",
        ),
        (
            "    hidden_states = self.norm",
            "    relu_(hidden_states)\n    hidden_states = self.norm",
        ),
        (
            "    hidden_states = inputs_embeds",
            "    position_ids = 2 * position_ids\n    hidden_states = inputs_embeds",
        ),
        (
            "    hidden_states = inputs_embeds",
            "    input_ids.clamp_(0)\n    hidden_states = inputs_embeds",
        ),
        (
            "    logits = self.lm_head(hidden_states)",
            "    logits = self.lm_head(hidden_states)\n    logits[..., 7] = 0",
        ),
        ("last_hidden_state=hidden_states", "last_hidden_state=hidden_states * 2.0"),
    ],
)
def test_code_that_is_another_is_no_stack(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As read from transformers' source, with one change each."""
    from flexinfer.layers import recognise

    model = fused("llama")
    source_of = recognise._source_of
    found: list[bool] = []

    def changed(function: Any) -> str | None:
        source = source_of(function)
        if source is not None and before in source:
            found.append(True)
            source = source.replace(before, after)
        return source

    monkeypatch.setattr(recognise, "_source_of", changed)
    assert find_decoder_stack(model) is None
    assert found
