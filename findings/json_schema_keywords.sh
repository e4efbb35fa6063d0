#!/usr/bin/env bash
# Two libraries that turn a JSON schema into a grammar for sampling differ in what they do with keywords that they do not
# implement. llguidance 1.7.6 raises an error that names the keyword. xgrammar 0.2.8 compiles the schema, for three of the twelve
# below with a line on stderr, and then accepts texts that violate it. A good guess would be that both enforce `allOf`, `anyOf` next to other keywords, or
# `minLength` next to `pattern`: xgrammar drops one of the two sides. vLLM 0.32 uses xgrammar by default.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet xgrammar==0.2.8 llguidance==1.7.6 jsonschema==4.26.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

import jsonschema
import llguidance
import xgrammar

small = {"type": "integer", "minimum": 0, "maximum": 9}
pair = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
# Keyword: a schema, and a JSON text that violates it.
SCHEMAS = {
    "not": ({**small, "not": {"const": 3}}, "3"),
    "if": ({**pair, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
    "dependentRequired": ({**pair, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "uniqueItems": ({"type": "array", "items": small, "uniqueItems": True}, "[1, 1]"),
    "contains": ({"type": "array", "items": small, "contains": {"const": 7}}, "[1, 1]"),
    "oneOf that overlap": ({"oneOf": [{**small, "maximum": 5}, {**small, "minimum": 4}]}, "5"),
    "two allOf": ({"allOf": [{**small, "minimum": 5}, small]}, "3"),
    "anyOf next to a range": ({**small, "anyOf": [{"maximum": 3}, {"maximum": 99}]}, "42"),
    "$ref next to minimum": ({"$defs": {"d": small}, "$ref": "#/$defs/d", "minimum": 5}, "3"),
    "pattern next to minLength": ({"type": "string", "pattern": "^a+$", "minLength": 3}, '"a"'),
    "enum next to type": ({"type": "string", "enum": ["a", 1]}, "1"),
    "minimum without type": ({"minimum": 5}, "3"),
}
REFUSED = {"not", "if", "dependentRequired", "uniqueItems", "contains", "oneOf that overlap"}

tokens = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256]
)
compiler, byte_tokenizer = xgrammar.GrammarCompiler(tokens), llguidance.LLTokenizer("byte")


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return "accepted" if matcher.accept_string(text) and matcher.accept_token(256) else "rejected"


def by_llguidance(schema, text):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(byte_tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return "schema refused"
    ids = byte_tokenizer.tokenize_str(text)
    return "accepted" if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting() else "rejected"


print(*(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "jsonschema")))
for keyword, (schema, text) in SCHEMAS.items():
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), keyword
    first, second = by_xgrammar(schema, text), by_llguidance(schema, text)
    print(f"{keyword}: {text} violates the schema; xgrammar: {first}; llguidance: {second}")
    assert first == "accepted", keyword
    assert second == ("schema refused" if keyword in REFUSED else "rejected"), keyword
PY
