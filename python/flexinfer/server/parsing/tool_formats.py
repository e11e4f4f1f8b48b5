"""TOOL_FORMATS: how each family of models writes its calls, by the names that vLLM has for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from flexinfer.server.parsing.harmony import HarmonyParser
from flexinfer.server.parsing.json_calls import JsonCalls, JsonForm
from flexinfer.server.parsing.pieces import Parser
from flexinfer.server.parsing.pythonic_calls import PythonicCalls
from flexinfer.server.parsing.xml_calls import Schemas, XmlCalls, XmlForm


@dataclass(frozen=True)
class ToolFormat:
    make: Callable[[Schemas], Parser]
    """A parser of one answer; it finds calls of these functions only."""
    is_special: bool = False
    """The marks are special tokens, which text is without by default."""


def _json(form: JsonForm, *, is_special: bool = False) -> ToolFormat:
    return ToolFormat(lambda schemas: JsonCalls(form, schemas), is_special)


def _xml(form: XmlForm) -> ToolFormat:
    return ToolFormat(lambda schemas: XmlCalls(form, schemas))


HERMES = JsonForm("<tool_call>", "</tool_call>")
LLAMA3 = JsonForm("<|python_tag|>", is_bare=True)
MISTRAL = JsonForm(
    "[TOOL_CALLS]", head=re.compile(r"([\w.:-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*$")
)
DEEPSEEK_V3 = JsonForm(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    re.compile(r"<｜tool▁sep｜>\s*([^\s<]+)\s*```json\s*$"),
)
DEEPSEEK_V31 = JsonForm(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    re.compile(r"<｜tool▁call▁begin｜>\s*([^\s<]+)\s*<｜tool▁sep｜>\s*$"),
)
KIMI_K2 = JsonForm(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    re.compile(r"functions\.([\w.-]+):\d+\s*<\|tool_call_argument_begin\|>\s*$"),
)
GRANITE = JsonForm("<|tool_call|>", is_bare=True)
INTERNLM = JsonForm("<|action_start|><|plugin|>", "<|action_end|>")
JAMBA = JsonForm("<tool_calls>", "</tool_calls>")
PHI4_MINI = JsonForm("functools")
QWEN3_CODER = XmlForm(
    begins=("<tool_call>", "<function="),
    opening=re.compile(r"(?:<tool_call>\s*)?<function=([^>\s]+)\s*>"),
    parameter=re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL),
    parameter_begin="<parameter=",
    close="</function>",
    end="</tool_call>",
)
GLM45 = XmlForm(
    begins=("<tool_call>",),
    opening=re.compile(r"<tool_call>\s*([^\s<]+)\s*(?=<)"),
    parameter=re.compile(
        r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
    ),
    parameter_begin="<arg_key>",
    close="</tool_call>",
)
MINIMAX_M2 = XmlForm(
    begins=("<minimax:tool_call>", "<invoke name="),
    opening=re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="?([^>"]+)"?>'),
    parameter=re.compile(r'<parameter name="?([^>"]+)"?>(.*?)</parameter>', re.DOTALL),
    parameter_begin="<parameter name=",
    close="</invoke>",
    end="</minimax:tool_call>",
)

HARMONY = ("openai", "gpt-oss")
"""vLLM's name, and SGLang's, of the form in which gpt-oss writes all that it says."""
TOOL_FORMATS = {
    "deepseek_v3": _json(DEEPSEEK_V3),
    "deepseek_v31": _json(DEEPSEEK_V31),
    "glm45": _xml(GLM45),
    **dict.fromkeys(HARMONY, ToolFormat(HarmonyParser, is_special=True)),
    "granite": _json(GRANITE, is_special=True),
    "hermes": _json(HERMES),
    "internlm": _json(INTERNLM, is_special=True),
    "jamba": _json(JAMBA),
    "kimi_k2": _json(KIMI_K2, is_special=True),
    "llama3_json": _json(LLAMA3, is_special=True),
    "llama4_json": _json(LLAMA3, is_special=True),
    "llama4_pythonic": ToolFormat(PythonicCalls, is_special=True),
    "minimax_m2": _xml(MINIMAX_M2),
    "mistral": _json(MISTRAL, is_special=True),
    "phi4_mini_json": _json(PHI4_MINI),
    "pythonic": ToolFormat(PythonicCalls),
    "qwen3_coder": _xml(QWEN3_CODER),
    "qwen3_xml": _xml(QWEN3_CODER),
}


def tool_format(name: str) -> ToolFormat:
    """Raises ValueError for an unknown name, with those that are known."""
    if name not in TOOL_FORMATS:
        known = ", ".join(sorted(TOOL_FORMATS))
        raise ValueError(f"unknown tool call parser {name!r}; there are {known}")
    return TOOL_FORMATS[name]
