"""Tokenizers of GGUF files: as llama.cpp cuts text, whatever the file leaves unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from transformers.convert_slow_tokenizer import bytes_to_unicode

from flexinfer.checkpoints.gguf.pre_tokenizers import (
    AFMOE,
    DEEPSEEK_3,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DIGITS,
    EXAONE_MOE,
    GLM_4,
    GPT_2,
    GPT_4O,
    JAIS_2,
    KIMI_K2,
    LLAMA_3,
    PRE_TOKENIZERS,
    QWEN_2,
    QWEN_35,
    SEED,
    TEKKEN,
    YOUTU,
    PreTokenizer,
)
from flexinfer.checkpoints.gguf.tokenizer import load_gguf_tokenizer
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.model_config import load_config
from helpers.gguf.files import add_sizes, finish
from helpers.gguf.models import CONFIGS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BEGIN, USER, END = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"
BYTE_TOKENS = {
    **dict.fromkeys(bytes_to_unicode().values(), NORMAL),
    **dict.fromkeys(["he", "ll", "hello"], NORMAL),
    **dict.fromkeys([BEGIN, END, "<|eot_id|>"], CONTROL),
    USER: USER_DEFINED,
}
"""What tokens are of which type. No merges lead to "hello"."""
PIECES = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL}
PIECES |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
PIECES |= dict.fromkeys(["▁", "h", "i", "hi", "▁hi", "▁h"], NORMAL)
SCORES = {"hi": -1.0, "▁hi": -2.0, "▁h": -3.0}


def write(path: Path, tokens: Mapping[str, int], **values: Any) -> str:
    """A file of sizes and a tokenizer, which the values describe; None: without it."""
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, CONFIGS["llama"]())
    writer.add_token_list(list(tokens))
    values = {"token_type": list(tokens.values()), **values}
    for key, value in values.items():
        name = key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}"
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 256), np.float32))
    for block in range(2):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.zeros(256, np.float32))
    finish(writer)
    return str(path)


def byte_level(path: Path, **values: Any) -> str:
    ids = {token: number for number, token in enumerate(BYTE_TOKENS)}
    own = {"model": "gpt2", "pre": "llama-bpe", "merges": ["h e", "l l"]}
    ends = {"bos_token_id": ids[BEGIN], "eos_token_id": ids[END]}
    return write(path, BYTE_TOKENS, **{**own, **ends, **values})


def sentencepiece(path: Path, **values: Any) -> str:
    scores = [SCORES.get(piece, -9.0) for piece in PIECES]
    own = {"model": "llama", "pre": "default", "scores": scores}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write(path, PIECES, **{**own, **ends, **values})


def of_text(path: Path, **values: Any) -> str:
    """As Gemma 4 has it: pieces and merges, and tokens of empty lines that none lead to."""
    pieces = PIECES | {"\n" * count: NORMAL for count in range(1, 6)}
    pieces |= {"<turn|>": CONTROL, "<|tool_response>": USER_DEFINED}
    own = {"model": "gemma4", "merges": ["h i", "\u2581 hi"]}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": False}
    return write(path, pieces, **{**own, **ends, **values})


def cut(path: str, text: str, add_special_tokens: bool = False) -> list[str]:
    tokenizer = load_gguf_tokenizer(path)
    ids = tokenizer(text, add_special_tokens=add_special_tokens).input_ids
    assert tokenizer.decode(ids) == text or add_special_tokens or text.startswith("<s>")
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ({}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "qwen2"}, False),
        ({"pre": "glm4"}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
    ],
)
def test_a_text_begins_as_the_file_or_the_name_of_its_tokenizer_says(
    values: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    """Most files of Llama 3 do not say it."""
    tokens = cut(byte_level(tmp_path / "model.gguf", **values), "he", add_special_tokens=True)
    assert tokens == ([BEGIN] if begins else []) + ["he"]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("llama-bpe", ["hello"]),
        ("glm4", ["hello"]),
        ("chatglm-bpe", ["he", "ll", "o"]),
        ("qwen2", ["he", "ll", "o"]),
    ],
)
def test_a_piece_that_is_a_token_needs_no_merges_in_some(
    pre: str, tokens: list[str], tmp_path: Path
) -> None:
    assert cut(byte_level(tmp_path / "model.gguf", pre=pre), "hello") == tokens


PIECES_OF = {
    GPT_2: ["We", "'", "LL", " fooBar", "12345", "\n\n ", " x"],
    DIGITS: ["We", "'", "LL", " fooBar", *"12345", "\n\n ", " x"],
    LLAMA_3: ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    replace(LLAMA_3, is_begun=False): ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    PreTokenizer(LLAMA_3.pattern): ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    JAIS_2: ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    SEED: ["We", "'LL", " fooBar", *"12345", "\n\n", " ", " x"],
    QWEN_2: ["We", "'LL", " fooBar", *"12345", "\n\n", " ", " x"],
    QWEN_35: ["We", "'LL", " fooBar", *"12345", "\n\n", " ", " x"],
    GPT_4O: ["We'LL", " foo", "Bar", "123", "45", "\n\n", " ", " x"],
    GLM_4: ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    DEEPSEEK_3: ["We", "'LL", " fooBar", "123", "45", "\n\n", " ", " x"],
    KIMI_K2: ["We'LL", " foo", "Bar", "123", "45", "\n\n", " ", " x"],
    YOUTU: ["We'LL", " foo", "Bar", *"12345", "\n\n", " ", " x"],
    DEEPSEEK_LLM: ["We", "'", "LL", " fooBar", "12345", "\n", "\n", " ", " x"],
    DEEPSEEK_CODER: ["We", "'", "LL", " fooBar", *"12345", "\n", "\n", " ", " x"],
    EXAONE_MOE: ["We", "'LL", " fooBar", *"12345", "\n\n", " ", " x"],
    AFMOE: ["We", "'LL", " fooBar", "12", "345", "\n\n", " ", " x"],
    TEKKEN: ["We", "'LL", " foo", "Bar", *"12345", "\n\n", " ", " x"],
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_nothing_is_merged_across_pieces(name: str, tmp_path: Path) -> None:
    """Cut as llama-server cuts it: 300 texts were compared by hand for each name (2026-11-28). In
    `kimi-k2`, `afmoe`, `deepseek-llm` and `deepseek-coder` some differ (docs/quantisation.md)."""
    path = byte_level(tmp_path / "model.gguf", pre=name)
    backend = load_gguf_tokenizer(path).backend_tokenizer
    cuts = backend.pre_tokenizer.pre_tokenize_str("We'LL fooBar12345\n\n  x")
    pieces = [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece, _ in cuts]
    assert pieces == PIECES_OF[PRE_TOKENIZERS[name]]


@pytest.mark.parametrize(("name", "count"), [("qwen2", 3), ("qwen35", 1)])
def test_marks_belong_to_letters_in_qwen_3_5(name: str, count: int, tmp_path: Path) -> None:
    path = byte_level(tmp_path / "model.gguf", pre=name)
    backend = load_gguf_tokenizer(path).backend_tokenizer
    assert len(backend.pre_tokenizer.pre_tokenize_str("a\u0301\u0327b")) == count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hi hi", ["hi", "\u2581hi"]),
        (" h\n hi", ["\u2581", "h", "\n", "\u2581hi"]),
        ("hi\n\n\nhi", ["hi", "\n\n\n", "hi"]),
        ("\n\n\n\n\n", ["\n\n\n\n\n"]),
        ("h\u00e9", ["h", "<0xC3>", "<0xA9>"]),
    ],
)
def test_text_by_merges_as_gemma_4_has_it(text: str, tokens: list[str], tmp_path: Path) -> None:
    """Cut as llama-server cuts it: 300 texts were compared by hand (2026-11-28)."""
    assert cut(of_text(tmp_path / "model.gguf"), text) == tokens


def test_a_text_of_gemma_4_begins_with_its_token_whatever_the_file_says(tmp_path: Path) -> None:
    path = of_text(tmp_path / "model.gguf", add_bos_token=False)
    assert cut(path, "hi", add_special_tokens=True) == ["<s>", "hi"]


def test_words_of_exaone_may_have_spaces_in_them(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "model.gguf", pre="exaone-moe")
    cuts = load_gguf_tokenizer(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str("he is, he")
    assert [end for _, (_, end) in cuts] == [5, 6, 9]


def test_chinese_characters_are_pieces_of_their_own_in_kimi(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "model.gguf", pre="kimi-k2")
    backend = load_gguf_tokenizer(path).backend_tokenizer
    cuts = backend.pre_tokenizer.pre_tokenize_str("he\u6f22\u5b57he")
    assert [end for _, (_, end) in cuts] == [2, 4, 6]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("seed-coder", "a;\n\nb", ["a", ";", "\n\n", "b"]),
        ("qwen2", "a;\n\nb", ["a", ";\n\n", "b"]),
        ("jais-2", f"a{' ' * 7}b", ["a", " " * 4, " " * 2, " b"]),
        ("llama-bpe", f"a{' ' * 7}b", ["a", " " * 6, " b"]),
        ("deepseek-v3", "a中文1234(b) $x", ["a", "中文", "123", "4", "(b", ")", " $", "x"]),
    ],
)
def test_what_only_some_cuts_have(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    backend = load_gguf_tokenizer(byte_level(tmp_path / "m.gguf", pre=pre)).backend_tokenizer
    cuts = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:end] for _, (first, end) in cuts] == expected


def test_padding_that_is_no_token_is_none(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(byte_level(tmp_path / "model.gguf", padding_token_id=2**32 - 1))
    assert tokenizer.pad_token is None


def test_scores_that_are_all_the_same_cut_nothing(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path / "model.gguf", scores=[-1000.0] * len(PIECES))
    with pytest.raises(UnsupportedModelError, match=r"same score for all .*Name another tokenizer"):
        load_gguf_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "swallows"), [("Phi-3 mini", True), ("my phi3", True), ("x", False)]
)
def test_special_tokens_of_phi_3_swallow_white_space(
    name: str, swallows: bool, tmp_path: Path
) -> None:
    """The file tells them by its name alone."""
    path = sentencepiece(tmp_path / "model.gguf", general__name=name, add_space_prefix=False)
    tokenizer = load_gguf_tokenizer(path)
    ids = tokenizer("<|im_end|> hi<s> hi", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_end|>",
        "hi" if swallows else "▁hi",
        "<s>",
        "▁hi",
    ]


def test_ends_of_answers_are_found_in_text_whatever_their_type(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "model.gguf", token_type=[NORMAL] * len(BYTE_TOKENS))
    assert cut(path, f"he{END}") == ["he", END]


def test_special_tokens_of_any_letters_are_found_in_text(tmp_path: Path) -> None:
    """DeepSeek's, which were spelled in bytes, and a token beyond the vocabulary began a text."""
    path = byte_level(tmp_path / "model.gguf")
    tokenizer = load_gguf_tokenizer(path)
    assert len(tokenizer) == len(BYTE_TOKENS)
    assert tokenizer.bos_token_id == list(BYTE_TOKENS).index(BEGIN)
    assert cut(path, f"{BEGIN}{USER}hello") == [BEGIN, USER, "hello"]
    special = tokenizer([f"{BEGIN}{USER}he"], add_special_tokens=False).input_ids[0]
    assert tokenizer.decode(special, skip_special_tokens=True) == f"{USER}he"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hi", ["▁hi"]),
        (" hi", ["▁", "▁hi"]),
        ("  hi", ["▁", "▁", "▁hi"]),
        ("<s>hi", ["<s>", "▁hi"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_has_a_space_in_front_of_a_text_and_behind_special_tokens(
    text: str, tokens: list[str], tmp_path: Path
) -> None:
    assert cut(sentencepiece(tmp_path / "model.gguf"), text) == tokens


def test_sentencepiece_has_no_such_space_where_the_file_says_so(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path / "model.gguf", add_space_prefix=False)
    assert cut(path, "hi") == ["hi"]
    assert cut(path, " hi") == ["▁hi"]


def test_all_tokens_end_an_answer_whose_text_says_so(tmp_path: Path) -> None:
    """Files name one of several: the end of a text, where a chat's turns end by another."""
    path = byte_level(tmp_path / "bytes.gguf")
    ids = [list(BYTE_TOKENS).index(token) for token in (END, "<|eot_id|>")]
    assert load_config(path).eos_token_id == ids
    assert load_config(sentencepiece(tmp_path / "pieces.gguf")).eos_token_id == [2, 3]
    count = len(PIECES) + 5
    assert load_config(of_text(tmp_path / "text.gguf")).eos_token_id == [2, 3, count, count + 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [({"pre": "klingon"}, "'klingon'.*Name another tokenizer"), ({"model": "t5"}, "kind 't5'")],
)
def test_tokenizers_that_are_not_known_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_gguf_tokenizer(byte_level(tmp_path / "model.gguf", **values))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bytes", {"merges": None}, r"no texts as its tokenizer\.ggml\.merges\. Name another"),
        ("bytes", {"merges": 3}, r"no texts as its tokenizer\.ggml\.merges"),
        ("bytes", {"merges": [3, 4]}, r"no texts as its tokenizer\.ggml\.merges"),
        ("bytes", {"merges": ["h e", "h zz"]}, "merges 'h' and 'zz', and has not all these"),
        ("bytes", {"add_bos_token": "false"}, r"add_bos_token = 'false'; known: true and false"),
        ("bytes", {"add_eos_token": 1}, "add_eos_token = 1; known: true and false"),
        ("bytes", {"bos_token_id": "<s>"}, "bos_token_id = '<s>', which is no token"),
        ("bytes", {"token_type": [1, 3]}, r"no tokenizer\.ggml\.token_type of 263 numbers"),
        ("pieces", {"token_type": 3}, r"no tokenizer\.ggml\.token_type of 266 numbers"),
        ("pieces", {"scores": None}, r"no tokenizer\.ggml\.scores of 266 numbers, one for each"),
        ("pieces", {"scores": [0.0, 1.0]}, r"no tokenizer\.ggml\.scores of 266 numbers"),
        ("pieces", {"add_space_prefix": "no"}, "add_space_prefix = 'no'"),
        ("pieces", {"unknown_token_id": True}, "unknown_token_id = True, which is no token"),
    ],
)
def test_tokenizers_that_lack_parts_are_refused_by_name(
    kind: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Text was cut into bytes where merges were missing."""
    make = byte_level if kind == "bytes" else sentencepiece
    with pytest.raises(UnsupportedModelError, match=message):
        load_gguf_tokenizer(make(tmp_path / "model.gguf", **values))


def test_special_tokens_of_sentencepiece_that_the_file_leaves_unsaid(tmp_path: Path) -> None:
    unsaid = {f"{name}_token_id": None for name in ("bos", "eos", "unknown")}
    path = sentencepiece(tmp_path / "model.gguf", **unsaid)
    tokenizer = load_gguf_tokenizer(path)
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    assert ids == (1, 2, 0)
    assert load_config(path).eos_token_id == [2, 3]
    assert cut(path, "hi", add_special_tokens=True) == ["<s>", "▁hi"]
