"""Folders whose config ties head and embedding, where the head is quantised or there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from flexinfer import LLM, SamplingParams
from flexinfer.layers.embedding import QuantisedEmbedding
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from helpers.packed_cases import CASES
from helpers.packed_folders import edit, write_folder
from helpers.tiny_models import (
    CONFIGS,
    MORE_CONFIGS,
    continue_prompt,
    draw_model,
    make_model,
    random_prompts,
)

EMBEDDING = "model.embed_tokens.weight"
PROMPTS = random_prompts((5, 17))


def tied_model(name: str = "llama") -> Any:
    config = (CONFIGS | MORE_CONFIGS)[name]()
    config.tie_word_embeddings = True
    return draw_model(config)


def check_tokens(folder: Path, written: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == continue_prompt(written, tuple(prompt), 10)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_an_embedding_that_is_there_is_not_the_quantised_head_s(name: str, tmp_path: Path) -> None:
    """It was thrown away."""
    written = write_folder(tmp_path, tied_model(), *CASES[name], has_head=True)
    own = torch.randn(written.model.embed_tokens.weight.shape)
    edit(tmp_path, lambda tensors: tensors.update({EMBEDDING: own}))
    written.model.embed_tokens.weight = torch.nn.Parameter(own)
    assert written.lm_head.weight is not written.model.embed_tokens.weight
    check_tokens(tmp_path, written)


def test_the_quantised_head_may_be_the_embedding_too(tmp_path: Path) -> None:
    written = write_folder(tmp_path, tied_model(), *CASES["gptq"], has_head=True)
    edit(tmp_path, lambda tensors: tensors.__delitem__(EMBEDDING))
    assert written.lm_head.weight is written.model.embed_tokens.weight
    check_tokens(tmp_path, written)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_nor_is_one_of_a_folder_that_is_quantised_at_load(
    name: str, quantization: str, tmp_path: Path
) -> None:
    """transformers does not tie what is there twice and differs. The folder of Mixtral is read
    expert by expert, that of Qwen3 by transformers."""
    model = tied_model(name)
    model.save_pretrained(tmp_path)
    head = torch.randn(model.lm_head.weight.shape)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    loaded: Any = load_model(str(tmp_path), dtype="float32", quantization=quantization).model
    ids = torch.arange(len(head))
    embedding = loaded.get_input_embeddings()
    assert torch.equal(embedding(ids), model.get_input_embeddings()(ids))
    assert not isinstance(embedding, QuantisedEmbedding)
    x = torch.randn(3, head.shape[1])
    error = (loaded.lm_head(x) - x @ head.t()).abs().max()
    assert error < (1e-4 if quantization == "auto" else 0.5)


def test_a_head_of_another_name_has_8_bits(tmp_path: Path) -> None:
    make_model("gpt_neox").save_pretrained(tmp_path)
    head: Any = load_model(str(tmp_path), quantization="int4").model.get_output_embeddings()
    assert isinstance(head, QuantisedLinear)
    assert head.nbytes == head.out_features * (head.in_features + 4 + 4)
