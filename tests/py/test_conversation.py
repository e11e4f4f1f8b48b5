"""Conversations keep their KV from turn to turn; forks share it and copy at most a tail row."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, Conversation, LoRARequest, ReleasedError, RequestError, SamplingParams
from helpers.hybrids import make_hybrid
from helpers.lora_kit import save_adapter
from helpers.tiny_models import (
    make_model,
    make_tokenizer,
    random_prompts,
    reference,
    save_chat_model,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make_llm(**settings: Any) -> LLM:
    defaults = {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, "chunk_bytes": 4096}
    return LLM(make_model("llama"), skip_tokenizer_init=True, **{**defaults, **settings})


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm
        check_nothing_is_left(llm)


def check_nothing_is_left(llm: LLM) -> None:
    """All conversations are closed: every prefix may go, and with them all memory in use."""
    manager = llm.llm_engine.manager
    manager.check_integrity()
    assert not llm.llm_engine.has_unfinished_requests()
    assert manager.stats().num_vtensors == 0
    manager.reset_prefix_cache()
    assert manager.stats().recorded_tokens == 0


def test_turns_go_on_from_all_that_was_said(llm: LLM) -> None:
    first, second = random_prompts((30, 9))
    with llm.conversation(first) as chat:
        answer = chat.generate(GREEDY).outputs[0].token_ids
        chat.append(second)
        output = chat.generate(GREEDY)
        history = [*first, *answer, *second]
        expected = reference("llama", tuple(history), 12)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == len(first) + len(answer) - 1
        assert chat.token_ids == [*history, *expected]


def test_the_kv_of_an_open_conversation_is_not_evicted() -> None:
    (prompt, *others) = random_prompts((100, 200, 201, 202, 203))
    with make_llm(kv_cache_memory_bytes=400 << 10, max_model_len=256) as llm:
        with llm.conversation(prompt) as chat:
            chat.generate(GREEDY)
            llm.generate(others, GREEDY, use_tqdm=False)
            llm.reset_prefix_cache()
            assert chat.generate(GREEDY).num_cached_tokens == 100 + 12 - 1
        check_nothing_is_left(llm)


def test_branches_share_all_whole_chunks_and_copy_a_tail(llm: LLM) -> None:
    manager = llm.llm_engine.manager
    (prompt,) = random_prompts((150,))
    with llm.conversation(prompt) as chat:
        chat.generate(SamplingParams(temperature=0, max_tokens=4))
        copied = manager.stats().chunks_copied
        branches = [chat.fork() for _ in range(3)]
        for i, branch in enumerate(branches):
            branch.append([i])
            output = branch.generate(SamplingParams(temperature=0, max_tokens=2))
            assert output.num_cached_tokens >= 150 + 4 - 1
            manager.check_integrity()
        assert manager.stats().chunks_copied - copied <= 3
        for branch in branches:
            branch.close()


def test_a_fork_says_what_a_conversation_of_its_own_would(llm: LLM) -> None:
    (prompt,) = random_prompts((40,))
    with llm.conversation(prompt) as chat:
        answer = chat.generate(GREEDY).outputs[0].token_ids
        with chat.fork() as left, chat.fork() as right:
            for branch, news in ((left, [7, 8]), (right, [7, 9, 10])):
                branch.append(news)
                expected = reference("llama", (*prompt, *answer, *news), 12)
                assert branch.generate(GREEDY).outputs[0].token_ids == expected
        assert chat.token_ids == [*prompt, *answer]


def test_an_answer_can_be_generated_again_from_a_fork(llm: LLM) -> None:
    with llm.conversation(random_prompts((40,))[0]) as chat:
        before = chat.fork()
        first = chat.generate(SamplingParams(seed=1, max_tokens=8))
        again = before.generate(SamplingParams(seed=2, max_tokens=8))
        assert first.outputs[0].token_ids != again.outputs[0].token_ids
        assert again.num_cached_tokens == 39
        before.close()


def test_a_fork_outlives_its_origin(llm: LLM) -> None:
    chat = llm.conversation(random_prompts((40,))[0])
    chat.generate(GREEDY)
    fork = chat.fork()
    chat.close()
    llm.reset_prefix_cache()
    assert fork.generate(GREEDY).num_cached_tokens == 40 + 12 - 1
    fork.close()


def test_conversations_hold_no_slots(llm: LLM) -> None:
    chats = [llm.conversation(prompt) for prompt in random_prompts((20,) * 9)]
    for chat in chats:
        chat.generate(GREEDY)
    assert llm.llm_engine.manager.stats().num_vtensors == 0
    assert all(chat.generate(GREEDY).num_cached_tokens == 31 for chat in chats)
    for chat in chats:
        chat.close()


def test_a_conversation_that_is_dropped_lets_its_kv_go(llm: LLM) -> None:
    chat = llm.conversation(random_prompts((40,))[0])
    chat.generate(GREEDY)
    del chat


def test_messages_and_answers_alternate(tmp_path: Path) -> None:
    with LLM(save_chat_model(tmp_path), kv_cache_memory_bytes=16 << 20) as llm:
        with llm.conversation([{"role": "system", "content": "x"}]) as chat:
            chat.say("hello", GREEDY)
            output = chat.say("world", GREEDY)
            roles = [message["role"] for message in chat.messages]
            assert roles == ["system", "user", "assistant", "user", "assistant"]
            assert chat.messages[-1]["content"] == output.outputs[0].text
            text = make_tokenizer().decode(output.prompt_token_ids)
            assert text.startswith("<s>system: x</s><s>user: hello</s><s>assistant: ")
            assert text.endswith("<s>user: world</s><s>assistant: ")
            assert output.num_cached_tokens > 0
        check_nothing_is_left(llm)


@pytest.fixture
def chat_llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(save_chat_model(tmp_path), kv_cache_memory_bytes="16MiB") as llm:
        yield llm
        check_nothing_is_left(llm)


def test_a_turn_computes_only_what_is_new(chat_llm: LLM) -> None:
    """Also where the answer's text would tokenize differently, as random answers do."""
    with chat_llm.conversation() as chat:
        for text in ("hello", "world", "again"):
            before = len(chat.token_ids)
            output = chat.say(text, GREEDY)
            assert output.prompt_token_ids[:before] == chat.token_ids[:before]
            assert output.num_cached_tokens == max(before - 1, 0)


def test_a_streamed_turn_is_that_of_say(chat_llm: LLM) -> None:
    with chat_llm.conversation() as chat, chat_llm.conversation() as streamed:
        chat.say("hello", GREEDY)
        outputs = list(streamed.stream("hello", GREEDY))
        assert len(outputs) > 1
        assert streamed.messages == chat.messages
        assert streamed.token_ids == chat.token_ids
        assert "".join(o.outputs[0].text for o in outputs) == chat.messages[-1]["content"]


def test_an_answer_that_is_left_early_keeps_what_was_said(chat_llm: LLM) -> None:
    with chat_llm.conversation() as chat:
        outputs = chat.stream("hello", SamplingParams(temperature=0, max_tokens=50))
        said = "".join(next(outputs).outputs[0].text for _ in range(3))
        outputs.close()
        assert chat.messages[-1] == {"role": "assistant", "content": said}
        before = len(chat.token_ids)
        assert not chat_llm.engine.has_unfinished_requests()
        output = chat.say("go on", GREEDY)
        assert output.prompt_token_ids[:before] == chat.token_ids[:before]


def test_a_turn_taken_back_can_be_answered_again(chat_llm: LLM) -> None:
    with chat_llm.conversation() as chat:
        chat.say("hello", GREEDY)
        before = list(chat.token_ids)
        first = chat.say("world", GREEDY).outputs[0].token_ids
        assert chat.take_back() == "world"
        assert chat.token_ids == before
        again = chat.say("world", GREEDY)
        assert again.outputs[0].token_ids == first
        assert (again.num_cached_tokens or 0) >= len(before) - 1
        assert [chat.take_back(), chat.take_back(), chat.take_back()] == ["world", "hello", None]
        assert chat.messages == []


def test_a_refused_turn_is_no_turn(chat_llm: LLM) -> None:
    with chat_llm.conversation() as chat:
        chat.say("hello", GREEDY)
        before = list(chat.messages)
        with pytest.raises(RequestError, match="max_model_len"):
            list(chat.stream("long " * 300, GREEDY))
        with pytest.raises(RequestError, match="max_model_len"):
            chat.say("long " * 300, GREEDY)
        assert chat.messages == before


def test_without_a_template_an_answer_ends_before_the_next_user(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, chat_template=None)
    with LLM(folder, kv_cache_memory_bytes="16MiB") as llm, llm.conversation() as chat:
        assert not chat.has_template
        output = chat.say("hello", GREEDY)
        assert make_tokenizer().decode(output.prompt_token_ids) == "User: hello\nAssistant:"


def test_an_answer_that_ends_at_a_stop_string_keeps_its_tokens(tmp_path: Path) -> None:
    """Its special tokens are in no text. The answer before it tokenizes differently, so that what
    the model sees of this one are its tokens alone."""
    tokenizer = make_tokenizer()
    special = tokenizer.bos_token_id
    allowed = [*(tokenizer.encode(letter)[0] for letter in "abcdefg"), special]
    say = {"allowed_token_ids": allowed, "logit_bias": {special: 3}, "stop": "g", "min_tokens": 8}
    model = save_chat_model(tmp_path)
    with LLM(model, kv_cache_memory_bytes="16MiB") as llm, llm.conversation() as chat:
        chat.say("hi", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        output = chat.say("go", SamplingParams(seed=5, max_tokens=60, **say))
        (answer,) = output.outputs
        assert answer.stop_reason == "g"
        assert special in answer.token_ids
        kept = [*output.prompt_token_ids, *answer.token_ids[:-1]]
        assert chat.token_ids == kept
        assert chat.say("on", GREEDY).prompt_token_ids[: len(kept)] == kept


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_state_is_kept_as_its_kv_is() -> None:
    settings = {"kv_cache_memory_bytes": 1 << 20, "chunk_bytes": 4096, "max_num_seqs": 2}
    with (
        LLM(make_hybrid("qwen3_next"), skip_tokenizer_init=True, **settings) as llm,
        llm.conversation(list(range(1, 121))) as chat,
    ):
        chat.generate(GREEDY)
        for prompt in random_prompts((200,) * 30):
            llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
        chat.append([7, 8, 9])
        assert chat.generate(GREEDY).num_cached_tokens == 131


def test_an_adapter_that_is_loaded_anew_has_kv_of_its_own(tmp_path: Path) -> None:
    save_adapter(tmp_path, seed=1)
    with make_llm(enable_lora=True) as llm:
        adapter = LoRARequest("sql", 1, str(tmp_path))
        with llm.conversation(list(range(1, 121)), lora_request=adapter) as chat:
            chat.generate(GREEDY)
            llm.llm_engine.remove_lora(1)
            save_adapter(tmp_path, seed=2)
            chat.append([7])
            chat.generate(GREEDY)
            llm.reset_prefix_cache()  # but what is pinned
            num_kept = len(chat.token_ids) - 1
            chat.append([8])
            assert chat.generate(GREEDY).num_cached_tokens == num_kept


def test_tenants_do_not_share(llm: LLM) -> None:
    (prompt,) = random_prompts((40,))
    with (
        llm.conversation(prompt, cache_salt="a") as chat,
        llm.conversation(prompt, cache_salt="b") as other,
    ):
        chat.generate(GREEDY)
        assert other.generate(GREEDY).num_cached_tokens == 0
        assert chat.generate(GREEDY).num_cached_tokens == 51


def test_what_is_computed_beside_an_answers_end_is_waited_for() -> None:
    """An answer that a token ended was not recorded yet when the conversation pinned its prefix,
    and held its memory until the next call."""
    (prompt,) = random_prompts((40,))
    with make_llm(async_scheduling=True) as llm, llm.conversation(prompt) as chat:
        (said,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        end = said.outputs[0].token_ids[6]
        chat.generate(SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[end]))
        assert llm.llm_engine.manager.stats().num_vtensors == 0
        llm.reset_prefix_cache()
        num_kept = len(chat.token_ids)
        assert num_kept < 52
        assert chat.generate(GREEDY).num_cached_tokens >= num_kept - 1


# Refusals.


def test_a_conversation_that_ends_while_the_engine_sleeps_keeps_no_memory(llm: LLM) -> None:
    """Nobody could unpin what one that was collected then had pinned."""
    llm.reset_prefix_cache()
    before = llm.llm_engine.manager.stats().recorded_tokens
    chats = [llm.conversation(prompt) for prompt in random_prompts((40, 30))]
    for chat in chats:
        chat.generate(GREEDY)
    llm.sleep()
    chats.pop().close()
    del chats, chat
    gc.collect()
    llm.wake_up()
    llm.reset_prefix_cache()
    assert llm.llm_engine.manager.stats().recorded_tokens == before


def test_turns_and_the_engines_sleep_may_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(save_chat_model(tmp_path), kv_cache_memory_bytes="16MiB") as llm:
        generate = llm.generate

        def then_sleep(*args: Any, **settings: Any) -> Any:
            outputs = generate(*args, **settings)
            llm.sleep()
            return outputs

        def said() -> list[Any]:
            return [message["content"] for message in chat.messages if message["role"] == "user"]

        with llm.conversation() as chat:
            chat.say("one", GREEDY)
            with monkeypatch.context() as crossed:
                crossed.setattr(llm, "generate", then_sleep)
                chat.say("two", GREEDY)
            assert said() == ["one", "two"]
            assert chat.take_back() == "two"
            with chat.fork() as fork:
                llm.wake_up()
                for one in (chat, fork):
                    assert one.say("three", GREEDY).num_cached_tokens > 0
        check_nothing_is_left(llm)


def test_a_turn_that_fails_changes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = random_prompts((40,))
    with llm.conversation(prompt) as chat:
        chat.generate(GREEDY)
        before = list(chat.token_ids)
        with monkeypatch.context() as broken:
            broken.setattr(llm.llm_engine.runner.backend, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                chat.generate(GREEDY)
        assert chat.token_ids == before
        assert chat.generate(GREEDY).num_cached_tokens == 51


def test_a_closed_conversation_can_not_go_on(llm: LLM) -> None:
    chat = llm.conversation([1, 2, 3])
    chat.close()
    chat.close()
    for use in (chat.generate, chat.fork, lambda: chat.append([1]), lambda: chat.say("x")):
        with pytest.raises(ReleasedError):
            use()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda chat: chat.generate(SamplingParams(n=2)), "one answer, got n=2: fork it instead"),
        (lambda chat: chat.say("hello"), "goes by token ids"),
    ],
)
def test_wrong_use_is_refused(llm: LLM, use: Any, message: str) -> None:
    with (
        llm.conversation([1, 2, 3]) as chat,
        pytest.raises(RequestError, match=message),
    ):
        use(chat)


def test_a_conversation_does_not_start_from_text(llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages or tokens, got 'hello'"):
        llm.conversation("hello")  # type: ignore[arg-type]


def test_an_empty_conversation_has_nothing_to_go_on_from(llm: LLM) -> None:
    with llm.conversation() as chat, pytest.raises(RequestError, match="empty"):
        chat.generate(GREEDY)


def test_without_prefix_cache_there_are_no_conversations() -> None:
    with (
        make_llm(enable_prefix_caching=False) as llm,
        pytest.raises(RequestError, match="needs enable_prefix_caching"),
    ):
        Conversation(llm)
