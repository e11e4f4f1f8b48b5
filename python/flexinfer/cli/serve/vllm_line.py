"""A command line of `vllm serve` in the words of ours.

-tp 2                       short forms are written out
--api-key k1 k2             several values after one flag become a flag for each
--block-size 16             what changes no answer is passed over, and so is what there is anyway
--pipeline-parallel-size 2  the rest stays, and is refused with what to do instead (cli/help.py)

MODEL may stand anywhere, as ever: without one elsewhere it is the last word of the last such list.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import typer

from flexinfer.cli.help import WholeNames
from flexinfer.cli.serve.vllm_flags import OF_SEVERAL, OWN_FLAGS, SHORT, SWITCHES
from flexinfer.runtime.vllm_arguments import advice, is_known_to_vllm, is_passed_over
from flexinfer.runtime.vllm_names import OWN_NAMES, WITHOUT_EFFECT

_passed_over: ContextVar[list[str]] = ContextVar("passed_over")


class ServeCommand(WholeNames):
    """A command that reads lines of vLLM's, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        line = _Line(_flags(self.get_params(ctx)), deque(args))
        line.read()
        _passed_over.set(line.passed_over)
        return super().parse_args(ctx, line.words)


def passed_over() -> Sequence[str]:
    """Names of what changes no answer, in the line that was read last and its file: for the log,
    of which the command itself knows where it goes."""
    return _passed_over.get()


def is_unneeded(key: str, value: Any) -> bool:
    """Whether an entry of a file is one of vLLM's that changes nothing here. Raises BadParameter
    for one that would."""
    name = _name_of(key)
    if not is_known_to_vllm(name):
        return False
    if not is_passed_over(name, value):
        raise typer.BadParameter(f"there is no option {key!r}: {advice(name)}")
    if name in WITHOUT_EFFECT:
        _passed_over.get().append(name)
    return True


def own_flag(key: str) -> str:
    """The flag, without dashes, of what is named so in a file."""
    return _as_flag(_name_of(key)).removeprefix("--")


@dataclass
class _Line:
    ours: Mapping[str, Any]
    """The command's own parameters by their flags."""
    given: deque[str]
    words: list[str] = field(default_factory=list)
    """What the command itself reads."""
    passed_over: list[str] = field(default_factory=list)
    has_model: bool = False
    last_listed: int | None = None
    """Where in `words` the last flag stands that was added for a further value."""

    def read(self) -> None:
        while self.given:
            word = _written_out(self.given.popleft())
            if word == "--":
                self.has_model |= bool(self.given)
                self.words += [word, *self.given]
                break
            if _is_flag(word):
                self._read_flag(word)
            else:
                self.has_model = True
                self.words.append(word)
        if not self.has_model and self.last_listed is not None:
            del self.words[self.last_listed]

    def _read_flag(self, word: str) -> None:
        flag, has_value, value = word.partition("=")
        name, _, key = _name_of(flag).partition(".")
        ours = flag if flag in self.ours else _as_flag(name)
        if name == "model":  # an older way of vLLM's
            self.has_model = True
            self.words += [value] if has_value else self._next()
        elif ours in self.ours and key:
            said = f"{ours} '{{\"{key}\": ...}}'"
            raise typer.BadParameter(f"write it as JSON: {said}", param_hint=flag)
        elif ours in self.ours:
            self._read_own(ours, has_value + value)
        elif is_known_to_vllm(_without_no(name)):
            self._read_other(name, [value] if has_value else None)
        else:
            self.words.append(word)

    def _read_own(self, flag: str, ending: str) -> None:
        """`ending`: "=" and a value, if it stood so."""
        own = self.ours[flag]
        if flag == "--hf-token" and not ending and not (self.given and not _is_flag(self.given[0])):
            return  # that of `hf auth login`, which is taken without the flag, too
        self.words.append(flag + ending)
        if own.is_flag or ending:
            return
        self.words += self._next()
        for value in self._listed() if own.multiple else ():
            self.last_listed = len(self.words)
            self.words += [flag, value]

    def _read_other(self, said: str, values: list[str] | None) -> None:
        """Pass it over, or leave it to be refused."""
        name = _without_no(said)
        if name in SWITCHES:
            value: Any = name == said
        elif values is not None:
            value = _value(values)
        else:
            value = _value([*self._listed()] if name in OF_SEVERAL else self._next())
        if not is_passed_over(name, value):
            self.words.append(_as_flag(name))
        elif name in WITHOUT_EFFECT:
            self.passed_over.append(name)

    def _next(self) -> list[str]:
        return [self.given.popleft()] if self.given else []

    def _listed(self) -> Iterator[str]:
        while self.given and not _is_flag(self.given[0]):
            yield self.given.popleft()


def _flags(params: Sequence[Any]) -> dict[str, Any]:
    return {
        flag: param
        for param in params
        for flag in (*param.opts, *param.secondary_opts)
        if _is_flag(flag)
    }


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _written_out(word: str) -> str:
    """-tp=2 -> --tensor-parallel-size=2, -O3 -> --optimization-level=3."""
    if word.startswith("-O") and word != "-O":
        return f"--optimization-level={word[2:].removeprefix('=')}"
    short = re.match(r"-\w+", word)
    name = SHORT.get(short[0]) if short is not None else None
    return word if short is None or name is None else _as_flag(name) + word[short.end() :]


def _name_of(flag: str) -> str:
    """As the engine's settings are named."""
    name = flag.lstrip("-").replace("-", "_")
    return OWN_NAMES.get(name, name)


def _as_flag(name: str) -> str:
    return "--" + OWN_FLAGS.get(name, name).replace("_", "-")


def _without_no(name: str) -> str:
    return name if is_known_to_vllm(name) else name.removeprefix("no_")


def _value(words: Sequence[str]) -> Any:
    """As a program would pass it."""
    if len(words) != 1:
        return list(words)
    if words[0] in ("", "None"):
        return None
    try:
        return json.loads(words[0])
    except ValueError:
        return words[0]
