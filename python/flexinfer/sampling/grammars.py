"""Structured outputs: what a request's text must look like, and the tokens that keep it so.

The grammar work is llguidance's (docs/server.md says why): before each sampling it names the
tokens that may come next, and the sampler gives all others no chance. No torch.
"""

from __future__ import annotations

import json as json_module
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from flexinfer.errors import EngineError, RequestError
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.sampling.closed_schema import closed_schema

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]
GrammarKey = tuple[str, str, str, bool, "Preamble | LarkPreamble | None"]
"""Kind, source, whitespace pattern, lenience, preamble."""

NUM_THREADS = 2
MAX_CACHED_GRAMMARS = 128
MAX_SOURCE_BYTES = 512 << 10
"""Half a megabyte of rules is compiled in about a second; 20,000 choices have as much."""
MAX_LEXER_STATES = 50_000
"""Of one grammar: at most some 100 MB."""
TOO_COMPLEX = "the grammar is too complex"
"""How the message of a failure begins that only shows while text is generated."""
COMPILE_TIMEOUT_S = 30.0
"""How long a caller waits for its grammar, those before it in the pool included."""
WHITESPACE = r"(\n[ \t]{0,16}| ?)"
"""Between the tokens of JSON: a blank, or a line's end and an indent. Without a bound, a weak model
goes on with blanks for ever."""


@dataclass(frozen=True)
class Preamble:
    """Free text before the structure, such as a model's reasoning: up to a mark, and line ends."""

    close: str
    open: str | None = None
    """With it, there is a preamble only if the text begins with this; None: there is one."""


@dataclass(frozen=True)
class LarkPreamble:
    """What comes before the structure, where that is more than free text."""

    rules: str
    """In Lark, of which `before` is the whole preamble; no rule is called `start` or `body`."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the fields is given. Names are those of vLLM."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema. Objects have no properties but those that it speaks of, where it does not say
    additionalProperties itself."""
    regex: str | None = None
    """The whole text matches it (Rust's syntax: no look-around, no back-references)."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar: Lark from the rule `start`, or EBNF (`::=`) from the rule `root`."""
    json_object: bool | None = None
    """Any JSON object."""
    whitespace_pattern: str = WHITESPACE
    """What may stand between the tokens of JSON, as a regex."""
    is_lenient: bool = False
    """Of a JSON schema, keywords that no grammar holds (uniqueItems, not, unknown formats) are left
    out, and oneOf is anyOf; else the request is refused for them."""
    preamble: Preamble | LarkPreamble | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.json is False and not given:  # the schema that nothing satisfies
            given = ["json"]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(_KINDS)}, "
                f"got {', '.join(given) or 'none'}"
            )
        if self.choice is not None and (not self.choice or isinstance(self.choice, str)):
            raise ValueError(f"choice must be a list of texts, got {self.choice!r}")

    @property
    def kind(self) -> Kind:
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """What is asked for, as text: equal for equal params."""
        value = getattr(self, self.kind)
        if value is True:  # as a schema: anything
            return "{}"
        return value if isinstance(value, str) else json_module.dumps(value)


_KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(eq=False)
class CompiledGrammar:
    """A matcher at the start of a text, for copies to be made of."""

    matcher: LLMatcher


NEVER_ENDS = "no text of finite length fits it: its rules, or references, lead back to themselves"
"""llguidance's "NoExtensionBias" in words."""


class GrammarCompiler:
    """Compiles params for one tokenizer, and keeps what was compiled. Thread-safe.

    llguidance works without the GIL: what takes long is to be asked for by `prepare`, and delays
    its caller alone.
    """

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._recent: OrderedDict[GrammarKey, CompiledGrammar] = OrderedDict()
        self._in_use: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Compile in a thread of the pool; it is found as long as the result is kept.

        The future raises RequestError for what cannot be compiled. Cancelling it takes back what
        no thread has begun; what one has, the limits end.
        """
        with self._lock:
            compiled = self._find(_key(params))
            if compiled is not None:
                done: Future[CompiledGrammar] = Future()
                done.set_result(compiled)
                return done
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, "flexinfer-grammar")
            return self._pool.submit(self.compile, params)

    def find(self, params: StructuredOutputsParams) -> CompiledGrammar | None:
        """What was compiled of it, if it is still kept."""
        with self._lock:
            return self._find(_key(params))

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """In this thread, or found. Raises RequestError for what cannot be compiled."""
        key = _key(params)
        compiled = self.find(params)
        if compiled is None:
            with panics_as_errors:
                compiled = CompiledGrammar(self._compile(params))
            with self._lock:
                self._in_use[key] = self._recent[key] = compiled
                while len(self._recent) > MAX_CACHED_GRAMMARS:
                    self._recent.popitem(last=False)
        return compiled

    def matcher(self, params: StructuredOutputsParams) -> TokenMatcher:
        """A matcher of its own for one text. Raises RequestError as `compile`."""
        return TokenMatcher(self.compile(params).matcher.deep_copy(), self._vocab_size)

    def check(self, params: StructuredOutputsParams, output_token_ids: Sequence[int]) -> None:
        """Raises RequestError for output that cannot have been drawn under these params."""
        tokens = list(output_token_ids)
        num_fitting = self.compile(params).matcher.deep_copy().validate_tokens(tokens)
        if num_fitting < len(tokens):
            raise RequestError(
                f"output_token_ids[{num_fitting}] is {tokens[num_fitting]}, which {params.kind} "
                "does not allow there"
            )

    def close(self) -> None:
        """Let the threads end. Nothing more can be prepared: that is a RuntimeError."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _find(self, key: GrammarKey) -> CompiledGrammar | None:
        compiled = self._in_use.get(key)
        if key in self._recent:
            self._recent.move_to_end(key)
        return compiled

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RequestError(
                "structured outputs need llguidance: pip install 'flexinfer[serve]'"
            ) from None
        size_bytes = len(params.source.encode()) + len(params.whitespace_pattern.encode())
        if size_bytes > MAX_SOURCE_BYTES:
            raise RequestError(
                f"{params.kind} has {size_bytes} bytes, but structured outputs may have at most "
                f"{MAX_SOURCE_BYTES}"
            )
        tokenizer = self._llg_tokenizer()
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        try:
            grammar = self._after(params.preamble, _grammar(params))
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise RequestError(f"{params.kind} cannot be compiled: {error}") from None
        # Some grammars turn out to be too large only when the first tokens are looked for.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{params.kind} cannot be compiled: {_first_line(matcher)}")
        return matcher

    def _after(self, preamble: Preamble | LarkPreamble | None, grammar: str) -> str:
        """The grammar of a text that begins with a preamble."""
        if preamble is None:
            return grammar
        is_json = grammar.startswith('{"grammars"')
        body = json_module.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
        lark = f"start: {self._before(preamble)}"
        return json_module.dumps({"grammars": [{"lark_grammar": lark}, {**body, "name": "body"}]})

    def _before(self, preamble: Preamble | LarkPreamble) -> str:
        """The rest of the rule `start`, and the rules that it needs."""
        if isinstance(preamble, LarkPreamble):
            return f"before @body\n{preamble.rules}"
        opened, any_text = self._mark(preamble.open), r"/(.|\n)*/"
        close = self._mark(preamble.close)
        if close.startswith("<["):  # a special token, which no text contains
            think, rules = f"{opened} any {close}", f"any: {any_text}"
        else:
            think, rules = "think", f"think[lazy]: {opened} {any_text} {close}"
        before = f"({think} gap)" + ("?" if preamble.open else "")
        return f"{before} @body\n{rules}\ngap: /[ \\n]{{0,4}}/"

    def _mark(self, mark: str | None) -> str:
        """In Lark: a special token by its id, else its text."""
        special = getattr(self._hf_tokenizer, "all_special_tokens", ())
        if mark in special and self._hf_tokenizer is not None:
            return f"<[{self._hf_tokenizer.convert_tokens_to_ids(mark)}]>"
        return json_module.dumps(mark) if mark else ""

    def _llg_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer

    def _make_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if self._hf_tokenizer is None:
            raise RequestError("structured outputs need a tokenizer, and this engine has none")
        if not self._eos_token_ids:
            raise RequestError("structured outputs need an end-of-sequence token, to end by")
        try:
            return from_tokenizer(
                self._hf_tokenizer,
                n_vocab=self._vocab_size,
                eos_token=sorted(self._eos_token_ids),
            )
        except ValueError as error:
            raise RequestError(
                f"structured outputs are not possible with this tokenizer: {error}"
            ) from None


class TokenMatcher:
    """Follows the output of one request. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_read = 0

    def allowed(
        self, output_token_ids: Sequence[int], num_drafted: int = 0
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[vocab_size] bool: which tokens may follow `output_token_ids`, all that was generated,
        the last `num_drafted` of them only proposed.

        When the text is complete only end-of-sequence tokens are; after a proposed token that may
        not stand there, or is too much for the grammar, none: that row fails, and nothing else.
        Raises EngineError.
        """
        import numpy as np

        num_drawn = len(output_token_ids) - num_drafted
        new = list(output_token_ids[self._num_read : num_drawn])
        if new and not self._matcher.is_stopped() and not self._matcher.consume_tokens(new):
            raise EngineError(_why(self._matcher))
        self._num_read += len(new)
        matcher = self._matcher
        if num_drafted:  # a matcher that fails, fails for good: this one's is a copy, for 1 us
            matcher, drafted = matcher.deep_copy(), list(output_token_ids[num_drawn:])
            if matcher.is_stopped() or matcher.validate_tokens(drafted) < num_drafted:
                return np.zeros(self._vocab_size, dtype=np.bool_)
            matcher.consume_tokens(drafted)
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            if num_drafted:
                return np.zeros(self._vocab_size, dtype=np.bool_)
            raise EngineError(_why(matcher))
        return np.unpackbits(mask, bitorder="little")[: self._vocab_size].view(np.bool_)


def _key(params: StructuredOutputsParams) -> GrammarKey:
    pattern = params.whitespace_pattern
    return (params.kind, params.source, pattern, params.is_lenient, params.preamble)


def _grammar(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance wants it. Raises ValueError."""
    from llguidance import LLMatcher

    if params.kind == "regex":
        return LLMatcher.grammar_from_regex(params.source)
    if params.kind == "grammar":
        return LLMatcher.grammar_from_lark(_as_lark(params.source))
    if params.kind == "choice":
        texts = list(params.choice or ())
        alternatives = " | ".join(json_module.dumps(text) for text in texts)
        # One lexeme for all of them is compiled several times as fast; it may not be empty.
        if "" in texts:
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
    whitespace = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(
        '{"type": "object"}' if params.kind == "json_object" else _closed(params.source),
        defaults={
            "whitespace_flexible": True,
            "whitespace_pattern": whitespace,
            "lenient": params.is_lenient,
        },
    )


def _closed(source: str) -> str:
    """What is no JSON is left to llguidance to say."""
    try:
        schema = json_module.loads(source)
    except (ValueError, RecursionError):
        return source
    return json_module.dumps(closed_schema(schema))


def _as_lark(grammar: str) -> str:
    """llama.cpp's and vLLM's EBNF (`root ::= ...`) in Lark's notation. Raises ValueError."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except GbnfToLarkError as error:
        raise ValueError(f"as EBNF it has an error: {error}") from None


def _why(matcher: LLMatcher) -> str:
    """It stopped at a token that it has not allowed, which is our fault, or at a limit."""
    line = _first_line(matcher)
    is_wrong_token = "doesn't satisfy the grammar" in line
    return f"{'structured output went wrong' if is_wrong_token else TOO_COMPLEX}: {line}"


def _first_line(matcher: LLMatcher) -> str:
    """And the reason, which regex errors have in a line further down."""
    line, *others = matcher.get_error().splitlines() or ["it stopped unexpectedly"]
    reason = next((other for other in others if other.startswith("error: ")), "")
    return NEVER_ENDS if line == "NoExtensionBias" else f"{line} {reason}".strip()
