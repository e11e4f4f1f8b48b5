"""Cut: into which pieces a byte-level tokenizer cuts text before it merges bytes.

Source: src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cut:
    """What the name of a byte-level tokenizer says."""

    pattern: str | None
    """Of pieces that nothing is merged across."""
    is_begun: bool = False
    """Whether a text begins with its special token, where the file does not say it; and whether a
    piece that is a token becomes it without merges. Both go together in these."""
    as_gpt_2: bool = False
    """Whether pieces are then cut as by GPT-2's pattern."""
    is_spelt: bool = True
    """Whether tokens are bytes, each spelt as a character. Else they are text, as SentencePiece has
    it, but by merges; and a text begins with its special token."""


LLAMA_3 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
)
QWEN_2 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_35 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Marks belong to the letters before them."""
TEKKEN = Cut(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
)
GPT_4O = Cut(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = Cut(None, as_gpt_2=True)
DIGITS = Cut(r"\p{N}", as_gpt_2=True)
GEMMA_4 = Cut(r"[^\n]+|\n+", is_spelt=False)
"""By the kind of the tokenizer: it has no name."""
OF_CUTS: tuple[tuple[Cut, str], ...] = (
    (LLAMA_3, "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (replace(LLAMA_3, is_begun=False), "dbrx smaug-bpe"),
    (QWEN_2, "qwen2 deepseek-r1-qwen megrez stablelm2 kormo hunyuan solar-open f2llmv2"),
    (QWEN_35, "qwen35"),
    (TEKKEN, "tekken"),
    (GPT_4O, "gpt-4o llama4 kanana2 talkie"),
    (GPT_2, "gpt-2 olmo phi-2 mpt jais a.x-4.0 gigachat mellum trillion exaone4 granite-docling"),
    (DIGITS, "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2"),
)
CUTS = {name: cut for cut, names in OF_CUTS for name in names.split()}
"""Those that are known, by `tokenizer.ggml.pre`."""
