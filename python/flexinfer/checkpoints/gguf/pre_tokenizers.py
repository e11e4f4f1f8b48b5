"""PreTokenizer: into which pieces a byte-level tokenizer cuts text before it merges bytes.

Source: src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What the name of a byte-level tokenizer says."""

    pattern: str | None
    """Of pieces that nothing is merged across."""
    is_begun: bool = False
    """Whether a text begins with its special token, where the file does not say it."""
    keeps_tokens: bool = False
    """Whether a piece that is a token becomes it without merges."""
    then: tuple[str, ...] = ()
    """Patterns by which the pieces, and what lies between them, are cut on, one after the other."""
    as_gpt_2: bool = False
    """Whether pieces are then cut as by GPT-2's pattern."""
    is_spelt: bool = True
    """Whether tokens are bytes, each spelt as a character. Else they are text, as SentencePiece has
    it, but by merges; and a text begins with its special token."""


LLAMA_3 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
    keeps_tokens=True,
)
QWEN_2 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_35 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Marks belong to the letters before them."""
WHITE = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4")
)
"""White space in the longest pieces that there are."""
JAIS_2 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{WHITE}|\s{{1,2}}(?!\S)|\s"
)
TEKKEN = PreTokenizer(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_begun=True,
    keeps_tokens=True,
)
GPT_4O = PreTokenizer(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = PreTokenizer(
    r"\p{N}{1,3}",
    then=(
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
KIMI_K2 = PreTokenizer(
    r"\p{Han}+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As the model's own, as YOUTU is. llama.cpp does not cut where a capital letter follows a small
one."""
YOUTU = PreTokenizer(
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+"
    "|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    then=(str(GPT_4O.pattern).replace("{1,3}", ""),),
    keeps_tokens=True,
)
WITH_CASES = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that DeepSeek's first tokenizers take together: of alphabets with two cases, not all."""
HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = PreTokenizer(
    r"[\r\n]",
    then=(
        rf"\s?[{WITH_CASES}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+\z",
        HAN_AND_HANGUL,
        r"\p{N}+",
    ),
)
DEEPSEEK_CODER = PreTokenizer(
    r"[\r\n]", then=(r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, r"\p{N}")
)
EXAONE_MOE = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Words may have spaces in them, as Korean ones do."""
AFMOE = PreTokenizer(
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    then=(
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
        "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
        "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        DEEPSEEK_3.then[1],
    ),
)
"""Digits by threes from the right."""
GLM_4 = replace(LLAMA_3, is_begun=False)
GPT_2 = PreTokenizer(None, as_gpt_2=True)
DIGITS = PreTokenizer(r"\p{N}", as_gpt_2=True)
GEMMA_4 = PreTokenizer(r"[^\n]+|\n+", is_spelt=False)
"""By the kind of the tokenizer: it has no name."""
NAMES: tuple[tuple[PreTokenizer, str], ...] = (
    (LLAMA_3, "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (PreTokenizer(LLAMA_3.pattern), "dbrx smaug-bpe chatglm-bpe"),
    (GLM_4, "glm4 glm5"),
    (DEEPSEEK_3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (KIMI_K2, "kimi-k2"),
    (YOUTU, "youtu"),
    (DEEPSEEK_LLM, "deepseek-llm"),
    (DEEPSEEK_CODER, "deepseek-coder"),
    (EXAONE_MOE, "exaone-moe"),
    (AFMOE, "afmoe"),
    (QWEN_2, "qwen2 deepseek-r1-qwen megrez stablelm2 kormo hunyuan solar-open f2llmv2"),
    (QWEN_35, "qwen35"),
    (TEKKEN, "tekken"),
    (GPT_4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (JAIS_2, "jais-2"),
    (SEED, "seed-coder"),
    (GPT_2, "gpt-2 olmo phi-2 mpt jais a.x-4.0 gigachat mellum trillion exaone4 granite-docling"),
    (DIGITS, "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2"),
)
PRE_TOKENIZERS = {name: pre for pre, names in NAMES for name in names.split()}
"""Those that are known, by `tokenizer.ggml.pre`."""
