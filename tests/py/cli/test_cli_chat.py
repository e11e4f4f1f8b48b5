"""`flexinfer chat` through a pipe: turns, commands, several lines, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.chat.interrupt import Interrupt
from flexinfer.cli.chat.local import LocalSession
from flexinfer.cli.chat.prompt import PromptReader
from flexinfer.cli.chat.sampling import ChatSampling
from flexinfer.cli.terminal_text import printable, size_text
from helpers.cli_folder import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("model"))


def session(folder: str, text: str | bytes, *arguments: str, exit_code: int = 0) -> str:
    command = ["chat", "--model", folder, "--max-tokens", "6", "--memory", "8MiB"]
    result = CliRunner().invoke(app, [*command, "--chunk-bytes", "4KiB", *arguments], input=text)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_second_turn_reuses_the_first(folder: str) -> None:
    out = session(folder, "Hello\nAnd you?\n")
    reused = [line for line in out.splitlines() if "reused" in line]
    assert " 0 reused" in reused[0]
    assert " 0 reused" not in reused[1]
    assert "tokens/s" in reused[1]


def test_the_end_of_input_and_exit_both_leave(folder: str) -> None:
    assert "reused" not in session(folder, "")
    assert "reused" not in session(folder, "/exit\nHello\n")


def test_the_commands(folder: str) -> None:
    out = session(folder, "Hello\n/memory\n/stats\n/help\n/nonsense\n")
    assert "tokens 0-" in out
    assert "recorded_tokens" in out
    assert "/system TEXT" in out
    assert "there is no /nonsense" in out


def test_a_reset_keeps_what_is_recorded(folder: str) -> None:
    out = session(folder, "Hello\n/reset\nHello\n", "--system", "Be kind.")
    assert "a new conversation" in out
    assert " 0 reused" not in [line for line in out.splitlines() if "reused" in line][1]


def test_a_new_system_prompt_begins_anew(folder: str) -> None:
    out = session(folder, "/system Be brief.\nHello\n/system\nHello\n")
    assert "with that system prompt" in out
    assert "without one" in out


def test_a_full_conversation_says_so_and_goes_on(folder: str) -> None:
    out = session(folder, f"{'long ' * 100}\nHello\n", exit_code=2)
    assert "max_model_len" in out
    assert out.count("reused") == 1


def test_a_model_without_template_stops_at_the_next_user(tmp_path: Path) -> None:
    out = session(make_folder(tmp_path, chat_template=None), "Hello\nMore\n")
    assert "no chat template" in out
    assert out.count("reused") == 2


def test_bytes_that_are_no_text_are_left_out_and_the_chat_goes_on(folder: str) -> None:
    out = session(folder, b"Hell\xff\n/history\nHello\n/history\n", exit_code=2)  # as one failed
    assert "that message is not text in UTF-8: it was not sent." in out
    assert "nothing was said yet" in out
    assert "user:\nHello\n" in out


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no chats today') }}", "refuses these messages: no chats today"),
        ("{% if %}", "refuses these messages: Expected an expression"),
    ],
)
def test_a_template_that_refuses_is_one_line(template: str, says: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    out = session(path, "Hello\nHello\n", exit_code=2)
    assert out.count(f"the model's chat template {says}") == 2


def test_a_closed_stdin_is_one_line_before_any_work() -> None:
    result = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m flexinfer.cli chat <&-"],
        capture_output=True,
        text=True,
    )
    said = "flexinfer: stdin is closed: there is nothing to read messages from\n"
    assert (result.returncode, result.stderr) == (2, said)


def test_a_seed_gives_the_same_answer_again(folder: str) -> None:
    sampled = ("--temperature", "0.8", "--top-k", "5", "--seed", "3")
    first, second = (session(folder, "Hello\n", *sampled).splitlines()[:-1] for _ in range(2))
    assert first == second


def reader(*lines: str) -> PromptReader:
    source: Iterator[str] = iter(lines)

    def read_line(_: str) -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    return PromptReader(read_line)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("hello",), "hello"),
        (("one \\", "two"), "one \ntwo"),
        (("one\\",), "one"),
        (('"""', "a", "  b", '"""'), "a\n  b"),
        (('"""a', 'b"""'), "a\nb"),
        (('"""a"""',), "a"),
        (('"""a', "b"), "a\nb"),
        (("",), ""),
        ((), None),
    ],
)
def test_messages_may_have_several_lines(lines: tuple[str, ...], message: str | None) -> None:
    assert reader(*lines).read() == message


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(folder: str) -> None:
    from flexinfer import LLM

    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started us in the background
    with LLM(folder, kv_cache_memory_bytes="8MiB", max_num_seqs=2) as llm:
        sampling = ChatSampling(temperature=0.0, max_tokens=100)
        said = LocalSession(llm.conversation())
        with Interrupt() as interrupt, closing(said.say("hello", sampling)) as pieces:
            for _ in pieces:
                os.kill(os.getpid(), signal.SIGINT)
                if interrupt.wanted:
                    break
        assert 0 < said.numbers.num_tokens < 100
        assert str(said.numbers).endswith("; stopped")
        assert len(said.messages) == 2
        assert not llm.engine.has_unfinished_requests()
        said.close()
    assert signal.getsignal(signal.SIGINT) is before


def answers(out: str) -> list[str]:
    """What the model said, in order: the line before each line of numbers."""
    lines = out.splitlines()
    return [lines[i - 1] for i, line in enumerate(lines) if "tokens/s" in line]


def test_a_fork_goes_on_and_leaves_its_origin(folder: str) -> None:
    out = session(folder, "Hello\n/fork\nIn two\n/branch 1\nIn one\n/branches\n/history\n")
    assert "branch 2, from 1" in out
    branches = out[out.index("* 1") :]
    assert "* 1  2 turns  In one" in branches
    assert "  2  2 turns  In two" in branches
    history = branches[branches.index("user:") :]
    assert "In one" in history
    assert "In two" not in history


def test_a_fork_reuses_what_it_shares(folder: str) -> None:
    out = session(folder, "Hello\n/fork\nIn two\n/branch 1\nIn one\n")
    reused = [line for line in out.splitlines() if "reused" in line]
    assert " 0 reused" in reused[0]
    assert all(" 0 reused" not in line for line in reused[1:])


def test_a_branch_that_is_not_there(folder: str) -> None:
    out = session(folder, "/branch 2\n/branch x\n")
    assert "there are branches 1 to 1; got '2'" in out
    assert "got 'x'" in out


def test_regenerate_answers_the_last_message_again(folder: str) -> None:
    out = session(folder, "/regenerate\nHello\n/regenerate\n/history\n")
    assert "there is no answer yet" in out
    assert len(answers(out)) == 2
    history = out[out.index("user:") :]
    assert history.count("user:") == history.count("assistant:") == 1


def test_undo_forgets_a_turn(folder: str) -> None:
    out = session(folder, "Hello\nMore\n/undo\n/history\n/undo\n/undo\n/history\n")
    assert "forgot: More" in out
    assert "forgot: Hello" in out
    assert "there is nothing to take back" in out
    assert "nothing was said yet" in out


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\n") == "a\ufffd[2Jb\tc\n"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.00 GiB")]
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert size_text(size) == text
