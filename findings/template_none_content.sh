#!/usr/bin/env bash
# Transformers 5.22 and 5.23: a chat template that asks whether the content of a message `is none`, as published templates with tool calls do,
# renders the calls with 5.22 and leaves them out with 5.23: `apply_chat_template` now removes every key whose value is None first, and the
# missing value is Jinja's undefined, which is not none; the template prints it as nothing. No error, no warning, and the public function that
# the method calls (`render_jinja_template`) still renders the calls. A good guess would be that None and a missing key are the same to a
# template, or that a message keeps the keys that its author wrote.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/render.py" <<'PY'
from importlib.metadata import version

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['content'] is none %}"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), chat_template=TEMPLATE)
method = tokenizer.apply_chat_template(messages, tokenize=False)
[function], _ = render_jinja_template([messages], chat_template=TEMPLATE)
print(f"transformers {version('transformers')}: method {method!r}, function {function!r}")
assert function == "[user]Rain?[assistant]weather"
assert method == (function if version("transformers") == "5.22.2" else "[user]Rain?[assistant]")
PY
for release in 5.22.2 5.23.0; do
  python3 -m venv "$folder/$release"
  "$folder/$release/bin/pip" install --quiet "transformers==$release" jinja2==3.1.6 numpy==2.3.5
  "$folder/$release/bin/python" "$folder/render.py"
done
