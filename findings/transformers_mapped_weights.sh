#!/usr/bin/env bash
# Transformers 5.19: `from_pretrained` on a CPU without a change of data type maps weights from the file instead of reading them. If another
# model is then written into the same file, the loaded model computes with its numbers, without a message. A good guess would be that a
# loaded model does not depend on its file, as models that are converted to another data type do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


def save(seed, folder):
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).save_pretrained(folder)
    return Path(folder, "model.safetensors")


mine, other = save(0, "mine"), save(1, "other")
ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))
own = mine.read_bytes()
moved = {}
for dtype in (torch.float32, torch.bfloat16):
    model = LlamaForCausalLM.from_pretrained("mine", dtype=dtype).eval()
    with torch.no_grad():
        before = model(ids).logits.float().log_softmax(-1)
        with mine.open("r+b") as file:
            file.write(other.read_bytes())
        moved[dtype] = (model(ids).logits.float().log_softmax(-1) - before).abs().max().item()
    del model
    mine.write_bytes(own)
print(f"transformers {version('transformers')}, torch {version('torch')}")
print(f"another model of the same size is written into the file: the loaded model changes by {moved[torch.float32]:.2f} nats")
print(f"if it was converted to bfloat16 when it was loaded: by {moved[torch.bfloat16]:.2f} nats")
assert moved[torch.float32] > 1.0
assert moved[torch.bfloat16] == 0.0
PY
