"""`flexinfer chat`: conversations at the terminal, whose KV cache stays from turn to turn.

Branches are conversations with a common past: each keeps its own messages, and on a local engine
or a FlexInfer server they share the chunks of what they have in common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from flexinfer.cli.chat.backend import Backend, BackendError, ChatSession
from flexinfer.cli.chat.interrupt import Interrupt
from flexinfer.cli.chat.prompt import NotTextError, PromptReader
from flexinfer.cli.errors import USAGE_ERROR, usage_errors
from flexinfer.cli.terminal_text import one_row, printable

if TYPE_CHECKING:
    from flexinfer.cli.chat.options import ChatSettings
    from flexinfer.cli.chat.sampling import ChatSampling

HELP = """\
/regenerate    another answer to the last message (sampled, also where answers are greedy)
/undo          forget the last message and its answer
/fork          go on in a new branch; this one stays as it is
/branch N      go to branch N; /branches lists them
/history       what was said in this branch
/memory        the memory map: which chunks hold what of the recorded conversations
/stats         numbers of the memory manager
/reset         begin a new conversation; what is recorded stays and is reused where it matches
/system TEXT   begin a new conversation with this system prompt ('/system' alone: without one)
/help          this list
/exit          leave (so does Ctrl-D)
A line that ends with \\ goes on; three double quotes begin and end a longer text.
Ctrl-C stops an answer."""

REGENERATE_TEMPERATURE = 0.8
"""Where answers are greedy: a greedy answer would be the same again."""
PREVIEW_CHARS = 60


class Chat:
    """One person and one backend; several branches, of which one goes on."""

    def __init__(
        self,
        backend: Backend,
        sampling: ChatSampling,
        system: str = "",
        reader: PromptReader | None = None,
    ) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._reader = reader or PromptReader()
        self._backend = backend
        self._sampling = sampling
        self._system = system
        self._branches: list[ChatSession] = [backend.session(system)]
        self._current = 0
        self.has_failed = False
        """A message has found no answer."""
        self._commands: dict[str, Callable[[str], None]] = {
            "/regenerate": self._regenerate,
            "/undo": self._undo,
            "/fork": self._fork,
            "/branch": self._go_to_branch,
            "/branches": self._list_branches,
            "/history": self._show_history,
            "/memory": self._show_memory,
            "/stats": self._show_stats,
            "/reset": self._reset,
            "/system": self._set_system,
            "/help": lambda _: self._note(HELP),
        }

    def run(self) -> None:
        """Chat until the end of input or /exit."""
        greeting = self._backend.greeting()
        self._note("\n".join([f"{greeting[0]} /help lists the commands.", *greeting[1:]]))
        while True:
            try:
                message = self._reader.read()
            except KeyboardInterrupt:  # at the prompt: drop the line
                self._console.print()
                continue
            except NotTextError as error:
                self.has_failed = True
                self._note(f"{error}.")
                continue
            word, _, rest = (message or "").partition(" ")
            if message is None or word in ("/exit", "/quit"):
                break
            if word in self._commands:
                self._run_command(word, rest.strip())
            elif word.startswith("/"):
                self._note(f"there is no {word}; /help lists the commands")
            elif message:
                self._answer(message, self._sampling)
        for branch in self._branches:
            branch.close()
        self._backend.close()

    @property
    def _session(self) -> ChatSession:
        return self._branches[self._current]

    def _run_command(self, word: str, rest: str) -> None:
        try:
            self._commands[word](rest)
        except BackendError as error:
            self._note(str(error))

    def _answer(self, message: str, sampling: ChatSampling) -> bool:
        """Whether there was an answer; else the conversation is as before."""
        try:
            with Interrupt() as interrupt, closing(self._session.say(message, sampling)) as pieces:
                for piece in pieces:
                    self._console.print(printable(piece), end="", markup=False)
                    if interrupt.wanted:
                        break
        except BackendError as error:
            self.has_failed = True
            self._note(f"{error}. /reset begins a new conversation, /undo takes a turn back.")
            return False
        self._console.print()
        self._note(str(self._session.numbers))
        return True

    def _regenerate(self, _: str) -> None:
        """In a fork first, so that a failure leaves the old answer."""
        again = self._session.fork()
        message = again.take_back()
        if message is None:
            again.close()
            self._note("there is no answer yet")
            return
        before, self._branches[self._current] = self._session, again
        temperature = self._sampling.temperature or REGENERATE_TEMPERATURE
        if self._answer(message, replace(self._sampling, temperature=temperature)):
            before.close()
        else:
            again.close()
            self._branches[self._current] = before

    def _undo(self, _: str) -> None:
        message = self._session.take_back()
        self._note("there is nothing to take back" if message is None else f"forgot: {message}")

    def _fork(self, _: str) -> None:
        self._branches.append(self._session.fork())
        origin, self._current = self._current, len(self._branches) - 1
        self._note(f"branch {self._current + 1}, from {origin + 1}; /branch {origin + 1} goes back")

    def _go_to_branch(self, number: str) -> None:
        if not (number.isdecimal() and 1 <= int(number) <= len(self._branches)):
            self._note(f"there are branches 1 to {len(self._branches)}; got {number!r}")
            return
        self._current = int(number) - 1
        self._show_history("")

    def _list_branches(self, _: str) -> None:
        lines = []
        for number, branch in enumerate(self._branches, start=1):
            said = [message for message in branch.messages if message["role"] == "user"]
            last = one_row(str(said[-1]["content"]))[:PREVIEW_CHARS] if said else ""
            mark = "*" if number == self._current + 1 else " "
            lines.append(f"{mark} {number}  {len(said)} turns  {last}")
        self._note("\n".join(lines))

    def _show_history(self, _: str) -> None:
        for message in self._session.messages:
            self._console.print(Text(f"{message['role']}:", "bold"))
            self._console.print(printable(str(message["content"])), markup=False)
        if not self._session.messages:
            self._note("nothing was said yet")

    def _show_memory(self, _: str) -> None:
        for part in self._backend.memory(self._console.width):
            self._note(part) if isinstance(part, str) else self._console.print(part)

    def _show_stats(self, _: str) -> None:
        self._note("\n".join(self._backend.stats()))

    def _reset(self, _: str) -> None:
        self._begin()
        self._note("a new conversation")

    def _set_system(self, text: str) -> None:
        self._system = text
        self._begin()
        self._note("a new conversation " + ("with that system prompt" if text else "without one"))

    def _begin(self) -> None:
        """A new conversation in place of this branch."""
        self._session.close()
        self._branches[self._current] = self._backend.session(self._system)

    def _note(self, text: str) -> None:
        self._console.print(Text(printable(text), "dim"))


def run_chat(settings: ChatSettings) -> None:
    """The command: open an engine or a server, and talk."""
    with usage_errors():
        reader = PromptReader()
        sampling = settings.sampling()
        system = settings.system
        backend: Backend
        if settings.url is not None:
            from flexinfer.cli.chat.remote import RemoteBackend

            backend = RemoteBackend(
                settings.url, settings.model, settings.api_key, settings.admin_api_key
            )
        else:
            from flexinfer.cli.chat.local import LocalBackend

            if system is None and settings.is_shipped:
                from flexinfer.cli.demo.script import load_script

                system = load_script(settings.folder, 1, 1, 0).system_prompt
            backend = local = LocalBackend(settings)
            sampling = sampling.filled(local.defaults)
        opened = Chat(backend, sampling, system or "", reader)
    opened.run()
    if opened.has_failed and not sys.stdin.isatty():  # a script does not read what was said
        raise typer.Exit(USAGE_ERROR)
