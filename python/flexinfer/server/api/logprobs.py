"""Log probabilities of the engine in the shapes of the two completion endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from flexinfer.outputs import CompletionOutput, Logprob, TokenLogprobs
from flexinfer.server.protocol.chat import ChatLogprobs, ContentLogprob, TokenLogprob
from flexinfer.server.protocol.completions import CompletionLogprobs


def chat_logprobs(output: CompletionOutput, num_top: int) -> ChatLogprobs:
    """`num_top` most probable tokens at each position, beside the chosen one."""
    return ChatLogprobs(content=[_content(entry, num_top) for entry in output.logprobs or ()])


def completion_logprobs(
    entries: Sequence[TokenLogprobs], num_top: int, offset: int, first: str | None = None
) -> CompletionLogprobs:
    """`offset`: where the text of these tokens begins, in characters; `first`: a prompt's first
    token, which stands before them and has no probability."""
    out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    if first is not None:
        out.tokens.append(first)
        out.token_logprobs.append(None)
        out.top_logprobs.append(None)
        out.text_offset.append(offset)
        offset += len(first)
    for entry in entries:
        chosen = next(iter(entry.values()))
        token = chosen.decoded_token or ""
        out.tokens.append(token)
        out.token_logprobs.append(chosen.logprob)
        top = {one.decoded_token or "": one.logprob for one in reversed(_top(entry, num_top))}
        out.top_logprobs.append({**top, token: chosen.logprob})
        out.text_offset.append(offset)
        offset += len(token)
    return out


def _content(entry: TokenLogprobs, num_top: int) -> ContentLogprob:
    chosen = _token(next(iter(entry.values())))
    return ContentLogprob(
        token=chosen.token,
        logprob=chosen.logprob,
        bytes=chosen.bytes,
        top_logprobs=[_token(one) for one in _top(entry, num_top)],
    )


def _top(entry: TokenLogprobs, num_top: int) -> list[Logprob]:
    """The most probable ones, best first. The chosen token stands first in `entry`, whatever its
    rank; tokens of equal probability may share a rank."""
    ranked = sorted(entry.values(), key=lambda one: (-one.logprob, one.rank or 0))
    return ranked[:num_top]


def _token(one: Logprob) -> TokenLogprob:
    text = one.decoded_token or ""
    return TokenLogprob(token=text, logprob=one.logprob, bytes=list(text.encode()))
