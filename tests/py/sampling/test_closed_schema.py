"""Objects have no properties but those that their schema speaks of, and all of these."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("llguidance")

from transformers import AutoTokenizer

from flexinfer import RequestError
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.sampling.closed_schema import closed_schema
from flexinfer.sampling.grammars import GrammarCompiler, StructuredOutputsParams

INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
ANY: dict[str, Any] = {"type": "object"}


def having(name: str, **fields: Any) -> dict[str, Any]:
    return {**ANY, "properties": {name: INT}, "required": [name], **fields}


A, B, C = having("a"), having("b"), having("c")
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
DEFS = {"$defs": {"A": A, "B": B}}
TREE = {"properties": {"v": INT, "k": {"items": {"$ref": "#/$defs/N"}}}, "required": ["v"]}

CASES: list[tuple[Any, list[str], list[str]]] = [
    (A, ['{"a":1}'], ['{"a":1,"z":2}', "{}"]),
    ({"properties": {"a": INT}}, ['{"a":1}', "3"], ['{"z":2}']),
    ({**ANY, "properties": {}}, ["{}"], ['{"z":2}']),
    ({"type": ["object", "null"], "properties": {"a": INT}}, ["null", '{"a":1}'], ['{"z":1}']),
    # What describes nothing is any object.
    (ANY, ["{}", '{"a":{"b":1}}'], []),
    ({}, ["3", '{"a":1}'], []),
    ({**ANY, "required": ["a"]}, ['{"a":1,"z":2}'], ["{}"]),
    ({**ANY, "properties": {"o": ANY}}, ['{"o":{"z":1}}'], ['{"z":1}']),
    ({**ANY, "minProperties": 1}, ['{"z":1}'], ["{}"]),
    # Taken at its word.
    (having("a", additionalProperties=True), ['{"a":1,"z":2}'], []),
    (having("a", additionalProperties=TEXT), ['{"a":1,"z":"x"}'], ['{"a":1,"z":2}']),
    (having("a", unevaluatedProperties=True), ['{"a":1,"z":2}'], []),
    (having("a", unevaluatedProperties=TEXT), ['{"a":1,"z":"x"}'], ['{"a":1,"z":2}']),
    (having("a", unevaluatedProperties=False), ['{"a":1}'], ['{"a":1,"z":2}']),
    ({**ANY, "unevaluatedProperties": False}, ["{}"], ['{"a":1}']),
    (having("o", properties={"o": A}, additionalProperties=INT), ['{"o":{"a":1},"z":1}'],
     ['{"o":{"a":1,"z":2}}']),
    (having("a", minProperties=2), ['{"a":1,"z":2}'], ['{"a":1}']),
    # Spoken of otherwise.
    ({**ANY, "properties": {"b": INT}, "required": ["a"]}, ['{"b":1,"a":"x"}'], ['{"a":1,"z":1}']),
    ({**ANY, "patternProperties": {"^a": INT}}, ['{"ab":1}', "{}"], ['{"z":1}', '{"ab":"x"}']),
    (having("q", patternProperties={"^a": INT}), ['{"q":1,"ab":1}'], ['{"q":1,"z":1}']),
    # Within.
    ({"additionalProperties": A}, ['{"o":{"a":1}}'], ['{"o":{"a":1,"z":2}}']),
    ({"type": "array", "items": A}, ['[{"a":1}]', "[]"], ['[{"a":1,"z":2}]']),
    ({"type": "array", "prefixItems": [INT, A]}, ['[1,{"a":1}]', "[1]"],
     ['[1,{"a":1,"z":2}]', '[1,{"a":1},3]']),
    ({"type": "array", "items": [INT, TEXT]}, ['[1,"a"]'], ['[1,"a",3]']),
    ({"type": "array", "prefixItems": [INT], "items": TEXT}, ['[1,"a"]'], ["[1,2]"]),
    ({"const": {"properties": {"x": 1}}}, ['{"properties":{"x":1}}'], []),
    (having("properties", properties={"properties": A}), ['{"properties":{"a":1}}'],
     ['{"properties":{"a":1,"z":1}}']),
    # Several parts about one object.
    ({"allOf": [A]}, ['{"a":1}'], ['{"a":1,"z":2}']),
    ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":1}', '{"a":1,"b":2,"z":3}']),
    ({**C, "allOf": [A, B]}, ['{"c":1,"a":1,"b":2}'], ['{"c":1}', '{"c":1,"a":1,"b":2,"z":3}']),
    ({"allOf": [REF_A, REF_B], **DEFS}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"z":3}']),
    ({**REF_A, **C, **DEFS}, ['{"a":1,"c":1}'], ['{"c":1}', '{"a":1,"c":1,"z":1}']),
    ({**ANY, "properties": {"o": REF_A}, "allOf": [REF_A], **DEFS}, ['{"o":{"a":1},"a":1}'],
     ['{"o":{"a":1,"o":1},"a":1}', '{"a":1,"z":1}']),
    ({"allOf": [A, {"required": ["b"]}]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"z":3}']),
    ({"allOf": [A, having("b", additionalProperties=True)]}, ['{"a":1,"b":2,"z":3}'], ['{"a":1}']),
    ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"a":1,"z":1}']),
    ({"oneOf": [REF_A, REF_B, {"type": "null"}], **DEFS}, ['{"a":1}', '{"b":1}', "null"],
     ['{"a":1,"b":1}', '{"a":1,"z":1}']),
    ({"anyOf": [A, ANY]}, ['{"z":1}'], []),
    ({**C, "anyOf": [A, B]}, ['{"c":1,"a":1}', '{"c":1,"b":1}'],
     ['{"c":1}', '{"c":1,"a":1,"b":1}', '{"c":1,"a":1,"z":1}']),
    ({**C, "anyOf": [REF_A, True], **DEFS}, ['{"c":1,"a":1}', '{"c":1}'], ['{"c":1,"z":1}']),
    ({"properties": {"a": INT, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ["{}", '{"a":1,"z":1}']),
    ({"allOf": [{"anyOf": [A, B]}, C]}, ['{"a":1,"c":1}', '{"b":1,"c":1}'],
     ['{"c":1}', '{"a":1,"c":1,"z":1}']),
    ({"anyOf": [A, B], "oneOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"z":1}']),
    ({**C, "if": A, "then": B}, ['{"c":1,"b":1}'], ['{"c":1,"z":1}']),
    # References of other kinds.
    ({**ANY, "properties": {"n": {"$ref": "#"}}}, ['{"n":{"n":{}}}'], ['{"n":{"z":1}}']),
    ({"allOf": [{"$ref": "#/$defs/N"}, A], "$defs": {"N": TREE}}, ['{"v":1,"k":[{"v":2}],"a":1}'],
     ['{"v":1,"k":[{"v":2,"a":1}],"a":1}', '{"v":1,"a":1,"z":1}']),
    ({**ANY, "properties": {"p": A, "q": {"$ref": "#/properties/p"}, "r": {"$ref": "#/x/A"}},
      "x": {"A": A}}, ['{"q":{"a":1},"r":{"a":1}}'],
     ['{"q":{"a":1,"z":1}}', '{"r":{"a":1,"z":1}}']),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", **A}}}, ['{"a":1}'], ['{"a":1,"z":1}']),
    ({**C, "allOf": [{"$ref": "#here"}], "$defs": {"x": {"$anchor": "here", **A}}},
     ['{"c":1,"a":1}'], ['{"c":1}']),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def fits(compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    params = StructuredOutputsParams(json=schema, is_lenient=True)
    matcher = compiler.compile(params).matcher.deep_copy()
    tokenizer: Any = compiler._hf_tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_objects_have_what_their_schema_speaks_of(
    compiler: GrammarCompiler, schema: Any, good: list[str], bad: list[str]
) -> None:
    before = copy.deepcopy(schema)
    assert [text for text in good if not fits(compiler, schema, text)] == []
    assert [text for text in bad if fits(compiler, schema, text)] == []
    assert schema == before


def test_a_schema_of_too_many_names_in_too_many_places_is_refused(
    compiler: GrammarCompiler,
) -> None:
    """2,000 branches beside 2,000 names would be 4 million."""
    branches = [having(f"b{i}") for i in range(2000)]
    beside = {f"p{i}": INT for i in range(2000)}
    with pytest.raises(RequestError, match=r"too many properties together .* additionalProperties"):
        fits(compiler, {"anyOf": branches, "properties": beside}, "{}")
    bare = {"anyOf": branches, "properties": beside, "additionalProperties": True}
    assert closed_schema(bare)["properties"] == beside


def test_a_long_chain_of_references_is_not_spelled_out_at_each_link() -> None:
    """Half a million names, were all said at each."""
    links = {
        f"d{i}": {
            "properties": {f"p{i}_{j}": INT for j in range(100)},
            "allOf": [{"$ref": f"#/$defs/d{i + 1}"}],
        }
        for i in range(100)
    }
    with pytest.raises(ValueError, match="too many properties"):
        closed_schema({"$ref": "#/$defs/d0", "$defs": {**links, "d100": A}})


def test_what_is_nested_without_end_is_refused() -> None:
    schema: Any = A
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        closed_schema(schema)
