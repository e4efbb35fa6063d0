#!/usr/bin/env bash
# Transformers 5.24: a config whose layers differ, such as the default one of Gemma 4 (head widths 256 and 512), refuses to name such a field
# with a RuntimeError. So `getattr(config, "head_dim", None)` and `hasattr(config, "head_dim")`, with which programs ask for a field that a family
# may lack, raise instead of answering, while the field is in `config.to_dict()` with one of the values. Two layers of the same width do not
# raise, so a small test model works and the published one does not. A good guess would be that `getattr` with a default never raises for a
# config, since a missing attribute is an AttributeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
from importlib.metadata import version

from transformers import Gemma4TextConfig, LlamaConfig


def answer(ask):
    try:
        return repr(ask())
    except Exception as error:
        return f"{type(error).__name__} ({', '.join(base.__name__ for base in type(error).__mro__[1:3])})"


published = Gemma4TextConfig(num_hidden_layers=6)
equal = Gemma4TextConfig(num_hidden_layers=6, head_dim=64, global_head_dim=64)
found = {
    "getattr with a default, published": answer(lambda: getattr(published, "head_dim", None)),
    "hasattr, published": answer(lambda: hasattr(published, "head_dim")),
    "to_dict, published": answer(lambda: published.to_dict()["head_dim"]),
    "each layer, published": answer(lambda: sorted({layer.head_dim for layer in published.per_layer_config})),
    "getattr with a default, equal widths": answer(lambda: getattr(equal, "head_dim", None)),
    "getattr with a default, another family": answer(lambda: getattr(LlamaConfig(), "no_such_field", None)),
}
print("transformers", version("transformers"))
for question, text in found.items():
    print(f"{question}: {text}")
refused = "AmbiguousGlobalPerLayerAttributeError (RuntimeError, Exception)"
assert found["getattr with a default, published"] == found["hasattr, published"] == refused
assert found["each layer, published"] == "[256, 512]"
assert found["getattr with a default, equal widths"] == "64"
assert found["getattr with a default, another family"] == "None"
PY
