#!/usr/bin/env bash
# peft 0.21.2: `target_modules` is stored as a set and written in its order, so two equal runs write different adapter_config.json unless
# PYTHONHASHSEED is set; the adapters themselves are equal. From 20 full names on, the file has suffixes instead, such as `q_proj`, if they
# select the same modules of this model. A good guess would be that the file has the list that was given, in its order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 peft==0.21.2
cd "$folder"
cat > save.py <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

layers, out = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, vocab_size=16)
)
kinds = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
names = [f"model.layers.{layer}.{kind}" for layer in range(layers) for kind in kinds]
get_peft_model(model, LoraConfig(r=2, target_modules=names)).save_pretrained(out)
PY
for layers in 3 4; do
    for seed in 1 2; do
        HF_HUB_OFFLINE=1 PYTHONHASHSEED=$seed "$folder/venv/bin/python" save.py $layers "$layers-$seed" 2>>"$folder/messages"
    done
done
"$folder/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

print("peft", version("peft"))
for layers in (3, 4):
    first, second = (json.loads(Path(f"{layers}-{seed}/adapter_config.json").read_text())["target_modules"] for seed in (1, 2))
    weights = [Path(f"{layers}-{seed}/adapter_model.safetensors").read_bytes() for seed in (1, 2)]
    print(f"{5 * layers} names were given; written: {len(first)}, beginning with {first[0]} in one run and {second[0]} in the other")
    assert sorted(first) == sorted(second) and first != second and weights[0] == weights[1]
    assert len(first) == (15 if layers == 3 else 5)
PY
