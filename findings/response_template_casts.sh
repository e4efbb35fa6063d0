#!/usr/bin/env bash
# Transformers 5.19: `tokenizer.parse_response(..., tools=...)` casts the arguments of a call with the schema of the tool, which is meant for
# formats whose values are only text. It also casts texts of JSON, which say themselves that they are texts. With a schema that allows a text or
# something else, the text loses, whichever the schema lists first: "007" becomes 7, and "None" becomes null. So a tool gets another value
# than the model wrote, although the one it wrote is valid. A good guess would be that a value which its schema allows is not changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 jsonschema==4.26.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>/dev/null <<'PY'
import json
from importlib.metadata import version

import jsonschema
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

call = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": {"function": "{content}"}}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
tokenizer.response_template = {"start_anchor": "<|assistant|>", "fields": {"content": {}, "tool_calls": call}}
CASES = [
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "007", 7),
    ({"type": ["string", "integer"]}, "1_000", 1000),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
    ({"type": ["string", "boolean"]}, "1", True),
    ({"type": "string"}, "007", "007"),
]
print("transformers", version("transformers"))
for schema, written, cast in CASES:
    assert jsonschema.Draft202012Validator(schema).is_valid(written)
    parameters = {"type": "object", "properties": {"key": schema}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    text = f"<call>{json.dumps({'name': 'find', 'arguments': {'key': written}})}</call>"
    [parsed] = tokenizer.parse_response(text, prefix="<|assistant|>", tools=[tool])["tool_calls"]
    read = parsed["function"]["arguments"]["key"]
    print(f"{json.dumps(schema)}: the model wrote {written!r}, the tool gets {read!r}")
    assert type(read) is type(cast) and read == cast
PY
