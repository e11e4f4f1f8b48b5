"""Models with quantised weights: what they answer, what it costs them, and what is refused."""

from __future__ import annotations

import copy
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

import flexinfer
from flexinfer import LLM, SamplingParams
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.embedding import QuantisedEmbedding
from flexinfer.layers.fuse import fuse_layers
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear
from helpers.families import make_family
from helpers.slow_products import BY_ROUNDING, furthest_behind, slow_model
from helpers.tiny_models import draw_model, make_model, random_prompts

SHIPPED = Path(flexinfer.__file__).parent / "data" / "tiny_chat"
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_chat"


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-g32-zp", "int4-a8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2"])
def test_greedy_output_is_that_of_slow_products_of_the_same_integers(
    name: str, scheme: str, tmp_path: Path
) -> None:
    make_model(name).save_pretrained(tmp_path)
    slow = slow_model(name, Scheme.parse(scheme))
    rounds_inputs = Scheme.parse(scheme).byte_inputs
    prompts = random_prompts((5, 17, 40))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), quantization=scheme, skip_tokenizer_init=True, dtype="float32") as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        behind = furthest_behind(slow, prompt, output.outputs[0].token_ids)
        assert behind <= (BY_ROUNDING if rounds_inputs else 0)


def held_out_dialogues(count: int) -> list[Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import dialogues
        from systems import NO_SYSTEM
    finally:
        sys.path.remove(str(EXAMPLE))
    rng = random.Random("quantisation")
    drawn = [dialogues.recall_dialogue(rng, system=NO_SYSTEM) for _ in range(count)]
    return [dialogues.messages(d) for d in drawn]


@torch.inference_mode()
def score(model: Any, ids: list[torch.Tensor], answers: list[list[bool]]) -> tuple[float, float]:
    """Perplexity of the answers' tokens, and which share of them is the most probable one."""
    losses, right = [], []
    for tokens, is_answer in zip(ids, answers, strict=True):
        logits = model(tokens[None]).logits[0, :-1].float()
        chosen = torch.tensor(is_answer[1:])
        expected = tokens[1:][chosen]
        losses.append(torch.nn.functional.cross_entropy(logits[chosen], expected, reduction="none"))
        right.append((logits[chosen].argmax(dim=1) == expected).float())
    return float(torch.cat(losses).mean().exp()), float(torch.cat(right).mean())


@pytest.fixture(scope="module")
def held_out() -> tuple[list[torch.Tensor], list[list[bool]]]:
    """Tokens of conversations, and whether each is one of an answer."""
    tokenizer = tf.AutoTokenizer.from_pretrained(SHIPPED)

    def render(messages: list[Any], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    ids, answers = [], []
    for messages in held_out_dialogues(30):
        tokens = render(messages, False)
        is_answer = [False] * len(tokens)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                first, last = len(render(messages[:i], True)), len(render(messages[: i + 1], False))
                is_answer[first:last] = [True] * (last - first)
        ids.append(torch.tensor(tokens))
        answers.append(is_answer)
    return ids, answers


@pytest.mark.parametrize(
    ("scheme", "bound"), [("int8", 1.005), ("int4", 1.03), ("int4-g32-zp", 1.03), ("int4-a8", 1.03)]
)
def test_the_shipped_model_loses_little(scheme: str, bound: float, held_out: Any) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    perplexity, recall = score(model, *held_out)
    fuse_layers(model, Scheme.parse(scheme))
    quantised_perplexity, quantised_recall = score(model, *held_out)
    print(scheme, perplexity, quantised_perplexity, recall, quantised_recall)
    assert quantised_perplexity < bound * perplexity
    assert quantised_recall > recall - 0.01


def score_with_engine(
    kv_dtype: str, ids: list[torch.Tensor], answers: list[list[bool]]
) -> tuple[float, float]:
    """As `score`, of an engine that reads its prompts' KV as it stores it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    losses, right = [], []
    with LLM(str(SHIPPED), kv_cache_dtype=kv_dtype, dtype="float32", device="cpu") as llm:
        prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in ids]
        for output, is_answer in zip(
            llm.generate(prompts, params, use_tqdm=False), answers, strict=True
        ):
            for place, tokens_at in enumerate(output.prompt_logprobs or ()):
                if tokens_at is not None and is_answer[place]:
                    found = tokens_at[output.prompt_token_ids[place]]
                    losses.append(-found.logprob)
                    right.append(found.rank == 1)
    return math.exp(sum(losses) / len(losses)), sum(right) / len(right)


def test_the_shipped_model_loses_nothing_by_quantised_kv(held_out: Any) -> None:
    perplexity, recall = score_with_engine("auto", *held_out)
    for kv_dtype in ("int8", "fp8_e4m3"):
        quantised_perplexity, quantised_recall = score_with_engine(kv_dtype, *held_out)
        print(kv_dtype, perplexity, quantised_perplexity, recall, quantised_recall)
        assert quantised_perplexity < 1.005 * perplexity
        assert quantised_recall > recall - 0.002


def test_all_layers_are_quantised_and_the_head_and_the_tied_embedding_have_8_bits() -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    fuse_layers(model, Scheme.parse("int4"))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}
    assert len(layers) == 4 * model.config.num_hidden_layers + 1
    assert layers["lm_head"].nbytes == 128 * 1024 + 1024 * (4 + 4)
    assert layers["model.layers.0.mlp.down_proj"].nbytes == 128 * 384 // 2 + 128 * 384 // 32 * 2
    embedding: Any = model.get_input_embeddings()
    assert isinstance(embedding, QuantisedEmbedding)
    assert embedding.nbytes == embedding.weight.numel() == 0


def test_a_layer_that_chooses_experts_stays_as_it_is() -> None:
    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(64, 8), "up": torch.nn.Linear(64, 8)})
    fuse_layers(model, Scheme.parse("int8"))
    assert isinstance(model["up"], QuantisedLinear)
    assert not isinstance(model["gate"], QuantisedLinear)


def test_gemma_3ns_mixers_of_states_stay_as_they_are(tmp_path: Path) -> None:
    """They have four inputs in published models, of which there is no group: int4 was refused."""
    from flexinfer.models.loading import load_model

    sizes = {"altup_num_inputs": 4, "laurel_rank": 32, "hidden_size_per_layer_input": 32}
    config = make_family("gemma3n").config
    draw_model(type(config)(**{**config.to_dict(), **sizes})).save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), quantization="int4").model
    altup, laurel = model.model.layers[0].altup, model.model.layers[0].laurel
    assert isinstance(laurel.linear_right, QuantisedLinear)
    for layer in (altup.prediction_coefs, altup.correction_coefs, altup.modality_router):
        assert not isinstance(layer, QuantisedLinear)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8", "dtype": "float16"}, "float32 or bfloat16, not in torch.float16"),
        ({"quantization": "int4-g128"}, r"has 64 inputs, which is no multiple of 128"),
        ({"quantization": "int8", "device": "cuda"}, "for the CPU alone"),
        ({"quantization": "fp8"}, "fp8.* is a method by which checkpoints are quantised"),
        ({"quantization": "int5"}, "quantization must be auto, int8, or int4"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_any_weight_is_read(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model("llama").config.save_pretrained(tmp_path)  # no weights at all
    from flexinfer.models.loading import load_model

    with pytest.raises((ValueError, UnsupportedModelError), match=message):
        load_model(str(tmp_path), **settings)


def test_a_model_that_is_loaded_already_is_not_quantised() -> None:
    with pytest.raises(UnsupportedModelError, match="loaded already"):
        LLM(make_model("llama"), quantization="int8", skip_tokenizer_init=True)


def test_a_checkpoint_that_is_quantised_already_is_refused_by_name(tmp_path: Path) -> None:
    config = copy.deepcopy(make_model("llama").config)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="quantised already, by 'bitsandbytes'"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
