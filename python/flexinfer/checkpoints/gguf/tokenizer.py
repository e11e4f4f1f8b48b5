"""The tokenizer and chat template of a GGUF file, which cuts text as llama.cpp does.

    gpt2     bytes by the merges of the file, inside of the pieces that a pattern cuts
    gemma4   text by the merges of the file, inside of lines, spaces as "▁"
    llama    SentencePiece: characters by the scores of what they become, spaces as "▁", one more in
             front of the text and behind each special token

Source: src/llama-vocab.cpp of llama.cpp, and vocabularies in its models/ with what they give.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flexinfer.checkpoints.gguf.config import token_id
from flexinfer.checkpoints.gguf.header import ENDS, TOKENS, GgufHeader, read_header, read_texts
from flexinfer.checkpoints.gguf.pre_tokenizers import GEMMA_4, PRE_TOKENIZERS, PreTokenizer
from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX = "tokenizer.ggml."
MERGES = f"{PREFIX}merges"
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in text as they stand."""
SPACE = "\u2581"
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
OTHER = "Name another tokenizer (tokenizer=, --tokenizer)"


def load_gguf_tokenizer(path: str) -> Any:
    """A tokenizer of transformers. Raises UnsupportedModelError for one that is not known."""
    from transformers import PreTrainedTokenizerFast

    header = read_header(path)
    pre = _pre_tokenizer_of(header)
    needed = (TOKENS,) if pre is None else (TOKENS, MERGES)
    texts = read_texts(path, needed)
    for key in needed:
        if key not in texts:
            raise UnsupportedModelError(f"{path!r} has no texts as its {key}. {OTHER}")
    tokens = texts[TOKENS]
    if pre is None:
        tokenizer = _sentencepiece(header, tokens)
    elif pre.is_spelt:
        tokenizer = _byte_level(header, tokens, texts[MERGES], pre)
    else:
        tokenizer = _of_text(header, tokens, texts[MERGES], pre)
    has_types = f"{PREFIX}token_type" in header.metadata
    types = _of_each(header, "token_type", tokens) if has_types else []
    special = _add_whole(tokenizer, tokens, types, _stripping(header, tokens, types))
    named = _named(header, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=_begins(header, pre),
        add_eos_token=_flag(header, "add_eos_token", False),
        extra_special_tokens=[token for token in special if token not in named.values()],
        chat_template=header.metadata.get("tokenizer.chat_template"),
        **named,
    )


def _pre_tokenizer_of(header: GgufHeader) -> PreTokenizer | None:
    """None: SentencePiece, which cuts nothing."""
    kind, name = (str(header.metadata.get(PREFIX + key)) for key in ("model", "pre"))
    if kind in ("llama", "gemma4"):
        return None if kind == "llama" else GEMMA_4
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{header.path!r} has a tokenizer of the kind {kind!r}; known are 'gpt2', 'gemma4' and "
            f"'llama'. {OTHER}"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path!r} has a tokenizer that cuts text by {name!r}; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. {OTHER}"
        )
    return PRE_TOKENIZERS[name]


def _begins(header: GgufHeader, pre: PreTokenizer | None) -> bool:
    """Whether a text begins with its special token. Of Gemma 4 whatever the file says, as some of
    the first say it does not."""
    if pre is None or pre.is_spelt:
        return _flag(header, "add_bos_token", pre is None or pre.is_begun)
    return True


def _flag(header: GgufHeader, name: str, default: bool) -> bool:
    value = header.metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise UnsupportedModelError(
            f"{header.path!r} has {PREFIX}{name} = {value!r}; known: true and false. {OTHER}"
        )
    return value


def _of_each(header: GgufHeader, name: str, tokens: list[str]) -> list[Any]:
    """A number for each token."""
    values = header.metadata.get(PREFIX + name)
    if not isinstance(values, list) or len(values) != len(tokens):
        raise UnsupportedModelError(
            f"{header.path!r} has no {PREFIX}{name} of {len(tokens)} numbers, one for each token. "
            f"{OTHER}"
        )
    return values


def _byte_level(
    header: GgufHeader, tokens: list[str], merges: list[str], pre: PreTokenizer
) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = _ids(tokens)
    pairs = _pairs(header, ids, merges)
    model = models.BPE(ids, pairs, ignore_merges=pre.keeps_tokens)
    tokenizer = Tokenizer(model)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.as_gpt_2)
    patterns = () if pre.pattern is None else (pre.pattern, *pre.then)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(header: GgufHeader, ids: Mapping[str, int], merges: list[str]) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        if not (left in ids and right in ids and left + right in ids):
            raise UnsupportedModelError(
                f"{header.path!r} merges {left!r} and {right!r}, and has not all these tokens. "
                f"{OTHER}"
            )
    return pairs


def _of_text(
    header: GgufHeader, tokens: list[str], merges: list[str], pre: PreTokenizer
) -> Tokenizer:
    """Lines that are empty are a token where there is one, with merges that lead to it or not."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    ids = _ids(tokens)
    pairs = _pairs(header, ids, merges)
    if ("\n", "\n") not in pairs:
        lines = [token for token in tokens if token and not token.strip("\n")]
        pairs += _merges(lines, [-float(len(line)) for line in lines])  # the shorter ones first
    tokenizer = Tokenizer(models.BPE(ids, pairs, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pre.pattern or ""), behavior="isolated")
    tokenizer.decoder = _spaces_and_bytes([])
    return tokenizer


def _spaces_and_bytes(more: list[Any]) -> Any:
    """What makes text of pieces."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + more)


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _of_each(header, "scores", tokens)
    if len({*scores}) == 1 < len(tokens):
        # As llama.cpp's converter writes them where it has no scores.
        raise UnsupportedModelError(
            f"{header.path!r} has the same score for all tokens: text would be cut otherwise than "
            f"the model has learnt it. {OTHER}"
        )
    merges = _merges(tokens, scores)
    tokenizer = Tokenizer(models.BPE(_ids(tokens), merges, fuse_unk=True, byte_fallback=True))
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    more: list[Any] = []
    if _flag(header, "add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        more.append(decoders.Strip(" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = _spaces_and_bytes(more)
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """What becomes one token, the best first: all ways to cut each in two."""
    ids = _ids(tokens)
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-score, -at, ids[left], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_whole(
    tokenizer: Tokenizer, tokens: list[str], types: list[int], strips: Collection[str]
) -> list[str]:
    """Have tokens found as they stand that no merges lead to. Returns the special ones. strips:
    those that swallow the white space behind them."""
    from tokenizers import AddedToken

    found: dict[int, list[str]] = {CONTROL: [], USER_DEFINED: []}
    for token, kind in zip(tokens, types, strict=False):
        # Some files have ends of answers among the usual tokens.
        own = CONTROL if token.encode() in ENDS else kind
        if own in found and token:
            found[own].append(token)
    whole, usual = (
        [AddedToken(t, normalized=False, rstrip=t in strips) for t in found[kind]]
        for kind in (CONTROL, USER_DEFINED)
    )
    tokenizer.add_special_tokens(whole)
    tokenizer.add_tokens(usual)
    return found[CONTROL]


def _stripping(header: GgufHeader, tokens: list[str], types: list[int]) -> set[str]:
    """Those that swallow the white space behind them: of Phi-3, which the file tells by its name
    alone, all special ones but three."""
    name = str(header.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return set()
    kinds = zip(tokens, types, strict=False)
    whole = {token for token, kind in kinds if kind in (CONTROL, USER_DEFINED)}
    return whole - {"<unk>", "<s>", "<|endoftext|>"}


def _named(header: GgufHeader, tokens: list[str]) -> dict[str, str | None]:
    """transformers' names of special tokens -> what they are."""
    ids = {name: token_id(header, key) for name, key in NAMED.items()}
    return {
        name: tokens[number] if number is not None and number < len(tokens) else None
        for name, number in ids.items()
    }
