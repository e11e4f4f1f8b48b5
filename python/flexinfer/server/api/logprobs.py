"""Log probabilities of the engine in the shapes of the two completion endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from flexinfer.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flexinfer.server.protocol.base import PromptLogprob, PromptLogprobs
from flexinfer.server.protocol.chat import ChatLogprobs, ContentLogprob, TokenLogprob
from flexinfer.server.protocol.completions import CompletionLogprobs
from flexinfer.server.token_bytes import TokenBytes


def chat_logprobs(output: CompletionOutput, num_top: int, token_bytes: TokenBytes) -> ChatLogprobs:
    """`num_top` most probable tokens at each position, beside the chosen one."""
    entries = output.logprobs or ()
    return ChatLogprobs(content=[_content(entry, num_top, token_bytes) for entry in entries])


class TextPlace:
    """Where the next token of a choice begins in the text of its tokens, in characters. They may
    hold more text than is shown: what may begin a stop string, or is a part of a character, comes
    later or never."""

    def __init__(self, num_hidden: int = 0) -> None:
        """`num_hidden`: characters of the first tokens that the text does not have."""
        self._offset = -num_hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pass_by(self, token: bytes) -> int:
        """Where this token begins; of a part of a character, where the character does."""
        begin = self._offset
        self._offset += len(self._decoder.decode(token))
        return max(0, begin)


def completion_logprobs(
    entries: Sequence[TokenLogprobs],
    num_top: int,
    place: TextPlace,
    token_bytes: TokenBytes,
    first: str | None = None,
) -> CompletionLogprobs:
    """`place`: where these tokens begin, moved behind them; `first`: a prompt's first token, which
    stands before them and has no probability."""
    out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    if first is not None:
        out.tokens.append(first)
        out.token_logprobs.append(None)
        out.top_logprobs.append(None)
        out.text_offset.append(place.pass_by(first.encode()))
    for entry in entries:
        token_id, chosen = next(iter(entry.items()))
        name = _name(token_id, chosen, token_bytes)
        out.tokens.append(name)
        out.token_logprobs.append(chosen.logprob)
        ranked = reversed(_top(entry, num_top))
        top = {_name(token, one, token_bytes): one.logprob for token, one in ranked}
        out.top_logprobs.append({**top, name: chosen.logprob})
        found = token_bytes.of(token_id, chosen.decoded_token or "")
        out.text_offset.append(place.pass_by(found))
    return out


def prompt_logprobs(output: RequestOutput, num_top: int | None) -> PromptLogprobs | None:
    """Of each prompt token its own and `num_top` most probable ones, by token id, as vLLM has
    them; None of the first one."""
    if num_top is None or output.prompt_logprobs is None:
        return None
    found: PromptLogprobs = []
    for entry in output.prompt_logprobs:
        shown = {} if entry is None else dict([*list(entry.items())[:1], *_top(entry, num_top)])
        found.append(
            {
                str(token): PromptLogprob(
                    logprob=one.logprob, rank=one.rank, decoded_token=one.decoded_token
                )
                for token, one in shown.items()
            }
            or None
        )
    return found


def _name(token_id: int, one: Logprob, token_bytes: TokenBytes) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI writes them."""
    text = one.decoded_token or ""
    found = token_bytes.of(token_id, text)
    if found == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _content(entry: TokenLogprobs, num_top: int, token_bytes: TokenBytes) -> ContentLogprob:
    chosen = _token(*next(iter(entry.items())), token_bytes)
    return ContentLogprob(
        token=chosen.token,
        logprob=chosen.logprob,
        bytes=chosen.bytes,
        top_logprobs=[_token(token, one, token_bytes) for token, one in _top(entry, num_top)],
    )


def _top(entry: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The most probable ones, best first; -1: all. The chosen token stands first in `entry`,
    whatever its rank; tokens of equal probability may share a rank."""
    ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return ranked if num_top < 0 else ranked[:num_top]


def _token(token_id: int, one: Logprob, token_bytes: TokenBytes) -> TokenLogprob:
    text = one.decoded_token or ""
    found = list(token_bytes.of(token_id, text))
    return TokenLogprob(token=text, logprob=one.logprob, bytes=found)
