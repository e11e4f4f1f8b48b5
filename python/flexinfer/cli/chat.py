"""`flexinfer chat`: a conversation at the terminal, whose KV cache stays from turn to turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from flexinfer.cli.answer import Answer, Interrupt
from flexinfer.cli.history import History, PlainFormat, choose_format
from flexinfer.cli.memory_map import recorded_rows, render_map
from flexinfer.cli.printable import ms_text, printable, size_text
from flexinfer.cli.reader import Reader
from flexinfer.cli.script import load_script
from flexinfer.cli.settings import EngineSettings
from flexinfer.errors import RequestError

if TYPE_CHECKING:
    from flexinfer.sampling_params import SamplingParams

HELP = """\
/memory        the memory map: which chunks hold what of the recorded conversations
/stats         numbers of the memory manager
/reset         begin a new conversation; what is recorded stays and is reused where it matches
/system TEXT   begin a new conversation with this system prompt ('/system' alone: without one)
/help          this list
/exit          leave (so does Ctrl-D)
A line that ends with \\ goes on; three double quotes begin and end a longer text.
Ctrl-C stops an answer."""


class Chat:
    """One person, one engine, one conversation at a time."""

    def __init__(
        self,
        engine: EngineSettings,
        params: SamplingParams,
        system: str | None,
        reader: Reader | None = None,
    ) -> None:
        """Loads the model. Raises ValueError or OSError for what can not work."""
        self._console = Console(highlight=False, soft_wrap=True)
        self._reader = reader or Reader()
        if system is None:
            system = load_script(engine.folder, 1, 1, 0).system_prompt if engine.is_shipped else ""
        self._llm = engine.open()
        self._format = choose_format(self._llm.get_tokenizer())
        if isinstance(self._format, PlainFormat):
            params = replace(params, stop=[PlainFormat.STOP])
        self._params = params
        self._system = system
        self._num_asked = 0
        self._history = self._new_history()
        self._commands: dict[str, Callable[[str], None]] = {
            "/memory": self._show_memory,
            "/stats": self._show_stats,
            "/reset": self._reset,
            "/system": self._set_system,
            "/help": lambda _: self._say(HELP),
        }

    def run(self) -> None:
        """Talk until the end of input or /exit."""
        self._greet()
        while True:
            try:
                message = self._reader.read()
            except KeyboardInterrupt:  # at the prompt: drop the line
                self._console.print()
                continue
            word, _, rest = (message or "").partition(" ")
            if message is None or word in ("/exit", "/quit"):
                break
            if word in self._commands:
                self._commands[word](rest.strip())
            elif word.startswith("/"):
                self._say(f"there is no {word}; /help lists the commands")
            elif message:
                self._answer(message)
        self._llm.close()

    def _greet(self) -> None:
        engine = self._llm.engine
        self._say(f"{engine.loaded.name}, {engine.max_model_len} tokens. /help lists the commands.")
        self._say(f"{engine.kv_memory}.")
        if isinstance(self._format, PlainFormat):
            self._say("The model has no chat template: it continues plain 'User: ...' text.")

    def _answer(self, message: str) -> None:
        prompt = self._history.ask(message)
        self._num_asked += 1
        try:
            answer = Answer(self._llm.engine, f"chat-{self._num_asked}", prompt, self._params)
        except RequestError as error:
            self._history.take_back()
            self._say(f"{error}. /reset begins a new conversation.")
            return
        with Interrupt() as interrupt:
            for piece in answer.pieces(interrupt):
                self._console.print(printable(piece), end="", markup=False)
        self._console.print()
        self._history.answer(prompt, self._kept(answer), answer.text)
        self._say(self._numbers(answer, prompt))

    def _kept(self, answer: Answer) -> list[int]:
        """The answer's tokens without those of a stop string, which is no part of the text."""
        tokens = list(answer.token_ids)
        if isinstance(answer.stop_reason, str):
            tokenizer = self._llm.get_tokenizer()
            while tokens and not answer.text.startswith(tokenizer.decode(tokens)):
                tokens.pop()
        return tokens

    def _numbers(self, answer: Answer, prompt: list[int]) -> str:
        return (
            f"{len(prompt)} prompt tokens, {answer.num_cached_tokens} reused; chunks: "
            f"{answer.chunks_aliased} aliased, {answer.chunks_copied} copied; first token after "
            f"{ms_text(answer.time_to_first_token_s)} ms, {answer.tokens_per_s:.0f} tokens/s"
            f"{answer.ending}"
        )

    def _new_history(self) -> History:
        return History(self._format, self._system, self._llm.engine.loaded.eos_token_ids)

    def _reset(self, _: str) -> None:
        self._history = self._new_history()
        self._say("a new conversation")

    def _set_system(self, text: str) -> None:
        self._system = text
        self._history = self._new_history()
        self._say("a new conversation " + ("with that system prompt" if text else "without one"))

    def _show_memory(self, _: str) -> None:
        manager = self._llm.engine.manager
        snapshot = manager.snapshot()
        stats = manager.stats()
        rows = recorded_rows(snapshot)
        if rows:
            self._console.print(render_map(rows, self._console.width))
        self._say(
            f"{stats.recorded_tokens} tokens recorded in {size_text(stats.recorded_bytes)}; "
            f"{size_text(stats.resident_bytes)} resident, budget {size_text(stats.budget_bytes)}; "
            f"one letter is one chunk of {size_text(manager.chunk_bytes)}"
            + (f", first of {snapshot.num_planes} planes" if snapshot.num_planes > 1 else "")
        )

    def _show_stats(self, _: str) -> None:
        for name, value in self._llm.engine.manager.stats().as_dict().items():
            if name.endswith("_bytes"):
                self._say(f"{name:22} {size_text(value)}")
            elif isinstance(value, dict):
                calls = {kind: entry["calls"] for kind, entry in value.items() if entry["calls"]}
                self._say(f"{name:22} {', '.join(f'{k} {n}' for k, n in calls.items())}")
            else:
                self._say(f"{name:22} {value:.0f}")

    def _say(self, text: str) -> None:
        self._console.print(Text(printable(text), "dim"))
