"""What recorded prefixes are called, and to whom."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.server.observability.prefix_names import MAX_CHARS, PrefixNames

TOKENIZER = AutoTokenizer.from_pretrained(str(SHIPPED_MODEL))


def name(text: str, *, more: int = 0, salt: str = "", shows_salted: bool = False) -> str:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    names = PrefixNames(TOKENIZER, shows_salted=shows_salted)
    return names.of(tokens, len(tokens) + more, salt)


def test_a_prefix_is_called_after_its_first_words() -> None:
    assert name("Once upon a time") == "Once upon a time"
    assert name("Once upon a time", more=3) == "Once upon a time…"
    assert name("one\n\ntwo   three") == "one two three"


def test_the_snapshot_of_a_recurrent_state_is_called_what_it_is() -> None:
    names = PrefixNames(TOKENIZER, shows_salted=False)
    assert names.of([-8, -1, -1], 64, "") == "(recurrent state)"


def test_names_can_be_put_together_where_a_node_was_split() -> None:
    tokens = TOKENIZER.encode("Story 12: once upon a time", add_special_tokens=False)
    names = PrefixNames(TOKENIZER, shows_salted=False)
    for cut in range(1, len(tokens)):
        parts = (tokens[:cut], tokens[cut:])
        assert "".join(names.of(part, len(part), "") for part in parts) == (
            "Story 12: once upon a time"
        )


def test_messages_of_a_chat_are_told_apart_without_their_markers() -> None:
    chat = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Good day."}],
        tokenize=False,
    )
    assert name(chat) == "Hello! · Good day."


def test_a_long_start_is_cut() -> None:
    found = name("Once upon a time " * 20)
    assert found.endswith("…")
    assert len(found) <= MAX_CHARS + 1


@pytest.mark.parametrize(("shows_salted", "shown"), [(False, ""), (True, "Once upon")])
def test_what_a_salt_keeps_apart_is_named_for_the_operator_only(
    shows_salted: bool, shown: str
) -> None:
    assert name("Once upon", salt="secret", shows_salted=shows_salted) == shown


def test_without_a_tokenizer_there_are_no_names() -> None:
    assert PrefixNames(None, shows_salted=True).of([1, 2], 2, "") == ""
