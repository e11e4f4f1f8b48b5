"""Incremental text equals the text of all tokens at once; stop strings end it and are held back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.engine import detokenizer
from flexinfer.engine.detokenizer import IncrementalDetokenizer, StopStrings

TEXTS = [
    "naïve café",
    "日本語のテキスト",
    "emoji 👩‍👩‍👧 🇨🇭!",
    "plain text, two  spaces",
    "\n\ttabs\n",
]


@cache
def byte_level_tokenizer() -> Any:
    """A byte-level BPE with few merges, so that characters span tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def sentencepiece_like_tokenizer() -> Any:
    """Metaspace and byte fallback, as in Llama 2: the first space of a decoded text is dropped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁hello",
        "▁world",
        "▁",
        "h",
        "wor",
        "ld",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def stream(tokenizer: Any, prompt: list[int], token_ids: list[int], **options: Any) -> list[str]:
    made = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*(made.append(t) for t in token_ids), made.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert "".join(stream(tokenizer, [], tokenizer(text).input_ids)) == text


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_any_text_after_any_prompt_comes_out_whole(prompt: str, text: str) -> None:
    tokenizer = byte_level_tokenizer()
    pieces = stream(tokenizer, tokenizer(prompt).input_ids, tokenizer(text).input_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_a_character_is_held_until_it_is_complete() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "Ŀ"]  # a byte that begins no character
    assert tokenizer.decode(ids) == "\ufffd"
    pieces = stream(tokenizer, [], ids)
    assert pieces == ["", "\ufffd"]


def test_bytes_that_are_no_text_do_not_hold_the_output_for_ever() -> None:
    tokenizer = byte_level_tokenizer()
    bad = tokenizer.convert_tokens_to_ids("Ŀ")
    pieces = stream(tokenizer, [], [bad] * 40)
    assert any(pieces[:20])


def test_leading_space_of_the_output_is_kept() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    hello, world = tokenizer.convert_tokens_to_ids(["▁hello", "▁world"])
    assert stream(tokenizer, [hello], [world, hello]) == [" world", " hello", ""]


def test_byte_fallback_characters_come_out_whole() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    hello = tokenizer.convert_tokens_to_ids("▁hello")
    assert "".join(stream(tokenizer, [hello], [*ids, hello])) == "€ hello"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens_are_skipped_on_request(skip: bool, text: str) -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*tokenizer("a").input_ids, tokenizer.eos_token_id, *tokenizer("b").input_ids]
    assert "".join(stream(tokenizer, [], ids, skip_special_tokens=skip)) == text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_like_tokenizer])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_backends_text_is_that_of_transformers(make: Any, skip: bool, data: Any) -> None:
    tokenizer = make()
    assert detokenizer._only_asks_backend(type(tokenizer))
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert detokenizer._decoder(tokenizer, skip)(ids) == expected


@pytest.mark.parametrize("name", ["decode", "_decode", "backend_tokenizer"])
def test_a_tokenizer_with_a_way_of_its_own_is_asked_itself(name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    own = type("Own", (PreTrainedTokenizerFast,), {name: lambda *_, **__: "mine"})
    assert not detokenizer._only_asks_backend(own)
    if name != "backend_tokenizer":
        tokenizer = own(tokenizer_object=byte_level_tokenizer().backend_tokenizer)
        assert detokenizer._decoder(tokenizer, True)([5]) == "mine"


# Stop strings.


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_text_is_cut_at_the_stop_string(include: bool, text: str) -> None:
    stops = StopStrings(["END"], include_in_output=include)
    assert [stops.append(piece) for piece in ["one E", "ND", ""]] == [None, "END", None]
    assert stops.text == text


def test_the_stop_string_that_begins_first_wins() -> None:
    stops = StopStrings(["cd", "bcde"], include_in_output=False)
    assert stops.append("abcde") == "bcde"
    assert stops.text == "a"


@pytest.mark.parametrize(
    ("stop", "text"),
    [("<", "a<s>b"), ("s", "a<s>b<"), (">b", "a<s>b<"), ("<s>", "a"), ("a<s>b", ""), ("b", "a<s>")],
)
def test_stop_strings_cut_no_special_token(stop: str, text: str) -> None:
    """Callers that are shown none, since its text is for a parser, cannot mean a part of one."""
    stops = StopStrings([stop], include_in_output=False)
    pieces = [("a", ""), ("<s>", "<s>"), ("b", ""), ("<", "")]
    any(stops.append(piece, special=special) for piece, special in pieces)
    assert stops.text == text


def test_unchecked_text_may_hold_a_stop_string() -> None:
    stops = StopStrings(["b"], include_in_output=False)
    assert stops.append("abc", check=False) is None
    assert stops.append("d") is None
    assert stops.text == "abcd"


def test_a_tail_that_may_become_a_stop_string_is_not_shown() -> None:
    stops = StopStrings(["END"], include_in_output=False)
    shown = []
    for piece in ["a", "E", "N", "x", "EN"]:
        stops.append(piece)
        shown.append(stops.take(finished=False))
    assert shown == ["a", "", "", "ENx", ""]
    assert stops.take(finished=True) == "EN"


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_shown_pieces_join_to_the_text_before_the_first_stop(
    pieces: list[str], stop: list[str]
) -> None:
    stops = StopStrings(stop, include_in_output=False)
    shown = ""
    for piece in pieces:
        if stops.append(piece) is not None:
            break
        shown += stops.take(finished=False)
    shown += stops.take(finished=True)
    assert shown == stops.text
    assert not any(text in shown for text in stop)
