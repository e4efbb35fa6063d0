#!/usr/bin/env bash
# Transformers 5.19: a `response_template` may have a default for a field that repeats, such as `"tool_calls": []` for messages without calls.
# `tokenizer.parse_response` appends the calls of a message to that list itself, not to a copy. So every message has the calls of all messages
# that were parsed before it, messages that call nothing too, and `save_pretrained` writes the calls into tokenizer_config.json. There
# is no message. A good guess would be that parsing a message depends on this message only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
import copy
import json
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = {
    "defaults": {"role": "assistant", "tool_calls": []},
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
MESSAGES = ['<call>{"name": "add", "arguments": {"a": 1}}</call>', '<call>{"name": "stop", "arguments": {}}</call>', "Done."]


def called(template):
    """The names of the calls of each message, parsed one after the other."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    tokenizer.response_template = template
    names = []
    for message in MESSAGES:
        parsed = tokenizer.parse_response(message, prefix="<|assistant|>")
        names.append([call["function"]["name"] for call in parsed.get("tool_calls", [])])
    tokenizer.save_pretrained("saved")
    saved = json.loads(Path("saved/tokenizer_config.json").read_text())["response_template"]["defaults"]
    return names, len(saved.get("tool_calls", []))


print("transformers", version("transformers"))
without = copy.deepcopy(TEMPLATE)
del without["defaults"]["tool_calls"]
expected, stored = called(without)
print(f"without the default: calls of three messages {expected}, saved with the tokenizer {stored}")
found, saved = called(TEMPLATE)
print(f"with the default []: calls of three messages {found}, saved with the tokenizer {saved}")
assert expected == [["add"], ["stop"], []] and stored == 0
assert found == [["add"], ["add", "stop"], ["add", "stop"]] and saved == 2
PY
if grep -qi "default" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message about the default"
