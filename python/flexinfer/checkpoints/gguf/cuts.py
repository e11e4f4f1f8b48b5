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
    """Whether a text begins with its special token, where the file does not say it."""
    keeps_tokens: bool = False
    """Whether a piece that is a token becomes it without merges."""
    before: tuple[str, ...] = ()
    """Patterns by which is cut first: their pieces, and what lies between them, are cut on."""
    as_gpt_2: bool = False
    """Whether pieces are then cut as by GPT-2's pattern."""


LLAMA_3 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
    keeps_tokens=True,
)
QWEN_2 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WHITE = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4")
)
"""White space in the longest pieces that there are."""
JAIS_2 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{WHITE}|\s{{1,2}}(?!\S)|\s"
)
TEKKEN = Cut(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
    keeps_tokens=True,
)
GPT_4O = Cut(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = Cut(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
GPT_2 = Cut(None, as_gpt_2=True)
DIGITS = Cut(r"\p{N}", as_gpt_2=True)
OF_CUTS: tuple[tuple[Cut, str], ...] = (
    (LLAMA_3, "llama-bpe llama-v3 llama3 falcon3 pixtral midm-2.0 lfm2 falcon-h1"),
    (replace(LLAMA_3, is_begun=False), "glm4 glm5"),
    (Cut(LLAMA_3.pattern), "dbrx smaug-bpe chatglm-bpe"),
    (QWEN_2, "qwen2 deepseek-r1-qwen megrez stablelm2 kormo hunyuan solar-open f2llmv2"),
    (JAIS_2, "jais-2"),
    (TEKKEN, "tekken"),
    (GPT_4O, "gpt-4o llama4 kanana2 talkie"),
    (SEED, "seed-coder"),
    (DEEPSEEK_3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (GPT_2, "gpt-2 olmo phi-2 mpt jais a.x-4.0 gigachat mellum trillion exaone4 granite-docling"),
    (DIGITS, "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2"),
)
CUTS = {name: cut for cut, names in OF_CUTS for name in names.split()}
"""Those that are known, by `tokenizer.ggml.pre`."""
