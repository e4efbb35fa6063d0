#!/usr/bin/env bash
# Transformers 5.19: importing the class of a tokenizer does not import torch, even where torch is installed. Importing `AutoTokenizer`, with
# which the same tokenizer is usually loaded, imports torch, its compiler, FSDP, sympy and Transformers' text generation: more than a thousand further
# modules and about twice the CPU time, although no model is involved. A good guess would be that both import the same, and that a program
# that only reads a tokenizer pays for no model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 numpy==2.3.5
cat > "$folder/imports.py" <<'PY'
import os
import sys
import time

began = time.process_time()
exec(sys.argv[1])
heavy = [name for name in ("torch", "torch._dynamo", "torch.distributed.fsdp", "sympy", "transformers.generation") if name in sys.modules]
print(len(sys.modules), f"{time.process_time() - began:.2f}", ",".join(heavy) or "none", flush=True)
os._exit(0)
PY
imports() { HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/imports.py" "from transformers import $1"; }
imports AutoTokenizer > /dev/null # compiles the modules
class=$(imports PreTrainedTokenizerFast)
auto=$(imports AutoTokenizer)
"$folder/venv/bin/python" - $class $auto <<'PY'
import sys
from importlib.metadata import version

class_modules, class_s, class_heavy, auto_modules, auto_s, auto_heavy = sys.argv[1:]
print("transformers", version("transformers"), "torch", version("torch"))
print(f"PreTrainedTokenizerFast: {class_modules} modules, {class_s} CPU-s, of the heavy ones {class_heavy}")
print(f"AutoTokenizer: {auto_modules} modules, {auto_s} CPU-s, of the heavy ones {auto_heavy}")
assert class_heavy == "none", "the class imports torch or a part of it"
assert {"torch", "torch._dynamo", "sympy"} <= set(auto_heavy.split(",")), "AutoTokenizer imports no models"
assert int(auto_modules) > int(class_modules) + 1000, "the difference has become small"
PY
