"""A head and the embedding that it is tied to read one weight, in panels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams
from flexinfer.layers import host_linear
from flexinfer.layers.embedding import QuantisedEmbedding
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.layers.tied_head import PanelEmbedding
from flexinfer.runtime.kernels import available_isas
from helpers.each_isa import each_isa
from helpers.tiny_models import (
    CONFIGS,
    MORE_CONFIGS,
    continue_prompt,
    draw_model,
    random_prompts,
)

isa = each_isa(host_linear, available_isas())
DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 96


@pytest.fixture(autouse=True)
def every_isa_is_taken(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Models take torch's products on CPUs where the kernel is slower."""
    monkeypatch.setattr(host_linear, "ISAS", (isa,))


def tied(vocab_size: int = 331, dtype: Any = torch.float32, **options: Any) -> Any:
    torch.manual_seed(vocab_size)
    embed = torch.nn.Embedding(vocab_size, WIDTH, **options)
    head = torch.nn.Linear(WIDTH, vocab_size, bias=False)
    model = torch.nn.ModuleDict({"embed": embed, "head": head}).to(dtype)
    model["head"].weight = model["embed"].weight
    return model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 64, 320, 331])
def test_it_gives_what_torch_gives(dtype: Any, vocab_size: int) -> None:
    model = tied(vocab_size, dtype)
    fused = copy.deepcopy(model)
    assert fuse_layers(fused) == {"HostLinear": 1, "PanelEmbedding": 1}
    assert fused["embed"].weight.data_ptr() == fused["head"].weight.data_ptr()
    every = torch.arange(vocab_size)
    for ids in (every, every.view(1, -1, 1), every[:0], every[0], every.flip(0)[:7]):
        assert torch.equal(fused["embed"](ids), model["embed"](ids))
    x = torch.randn(1, 9, WIDTH).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused["head"](x), model["head"](x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_is_kept(dtype: Any) -> None:
    model = draw_model(tied_config("gemma3")).to(dtype)
    embed = model.get_input_embeddings()
    ids = torch.arange(model.config.vocab_size)
    expected = embed(ids)
    assert embed.embed_scale != 1
    fuse_layers(model)
    fused = model.get_input_embeddings()
    assert isinstance(fused, PanelEmbedding)
    assert torch.equal(fused(ids), expected)


def tied_config(name: str) -> Any:
    config = (CONFIGS | MORE_CONFIGS)[name]()
    config.tie_word_embeddings = True
    return config


class Doubled(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class Hides(torch.nn.Embedding):
    """Another one for a token that no trial looks up."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids != 7)[..., None]


def change(model: Any, name: str) -> Any:
    if name == "three users":
        model["third"] = torch.nn.Linear(WIDTH, 331, bias=False)
        model["third"].weight = model["head"].weight
    elif name == "two heads, no embedding":
        model["embed"] = torch.nn.Linear(WIDTH, 331, bias=False)
        model["embed"].weight = model["head"].weight
    elif name == "hook":
        model["embed"].register_forward_hook(lambda *_: None)
    elif name == "hook of the head":
        model["head"].register_forward_pre_hook(lambda *_: None)
    elif name == "forward":
        model["embed"].forward = lambda ids: ids
    elif name == "other class":
        model["embed"].__class__ = Doubled
    elif name == "other code":
        model["embed"].__class__ = Hides
    elif name == "other head":
        model["head"].__class__ = type("Other", (torch.nn.Linear,), {})
    elif name == "float16":
        model.half()
    elif name == "norms":
        model["embed"].max_norm = 1.0
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("three users", "two heads, no embedding", "hook", "hook of the head", "forward"),
        *("other class", "other code", "other head", "float16", "norms"),
    ],
)
def test_what_is_not_known_stays(name: str) -> None:
    model = change(tied(), name)
    assert fuse_layers(model) == {}
    assert not any(isinstance(m, HostLinear | PanelEmbedding) for m in model.modules())


class ReadsIt(torch.nn.Module):
    """As Gemma 4's class for images reads a row of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = tied()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        model = self.language_model
        return model["head"](model["embed"](ids)) + self.language_model.embed.weight[0, 0]

    def get_output_embeddings(self) -> torch.nn.Module:
        head: torch.nn.Module = self.language_model["head"]
        return head


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_an_embedding_stays_that_code_further_up_reads(scheme: str | None) -> None:
    model = ReadsIt()
    before = model.language_model["embed"]
    fuse_layers(model, None if scheme is None else Scheme.parse(scheme))
    assert model.language_model["embed"] is before
    assert isinstance(model.language_model["head"], QuantisedLinear) == (scheme is not None)


def test_a_trial_tells_what_the_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PanelEmbedding, "forward", lambda _, ids: torch.zeros(*ids.shape, WIDTH))
    assert fuse_layers(tied()) == {}


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo"])
def test_a_model_of_a_folder(name: str, quantization: Any, tmp_path: Path) -> None:
    """Its tokens are those of transformers; quantised, the embedding's rows are those of the head.
    OLMo's norms have no weights: after the head's no parameter of transformers' would be left."""
    model = draw_model(tied_config(name))
    model.save_pretrained(tmp_path)
    prompts = random_prompts((5, 70, 20, 1))
    settings: Any = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", quantization=quantization, **settings) as llm:
        loaded = llm.llm_engine.loaded.model
        outputs = llm.generate(prompts, params, use_tqdm=False)
    embedding = loaded.get_input_embeddings()
    if quantization is not None:
        weight = model.get_input_embeddings().weight
        rows = Scheme.parse("int8").quantise(weight.detach()).dequantised()
        rows *= getattr(model.get_input_embeddings(), "embed_scale", 1)
        assert isinstance(embedding, QuantisedEmbedding)
        assert torch.equal(embedding(torch.arange(len(rows))), rows)
    else:
        assert isinstance(embedding, PanelEmbedding)
        expected = [continue_prompt(model, tuple(prompt), 8) for prompt in prompts]
        assert [output.outputs[0].token_ids for output in outputs] == expected
