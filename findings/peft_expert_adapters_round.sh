#!/usr/bin/env bash
# PEFT 0.21.2 with Transformers 5.19.0 and torch 2.13.0+cpu: `target_parameters` adapts experts that Transformers fuses into one tensor. A and B are float32,
# as for linear layers, but the forward pass computes with one tensor W + s B A in the data type of W. In bfloat16, an entry of B A below half a unit in the last
# place of W is gone before it meets an input: with entries of B of 1e-5 (one Adam step at that learning rate), 1.7 % of the experts' weights move, and what is
# computed with is 99 % away from B A; with 1e-4, 85 %; with 1e-2, 2 %. The adapter of a linear layer adds B A x to W x instead and loses nothing of B A. A
# good guess would be that float32 adapters of experts learn as those of linear layers do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.19.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PY' 2>/dev/null
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
sizes |= {"head_dim": 64, "intermediate_size": 64, "moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 2}


def used(size):
    """The fraction of the experts' weights that move, and the relative error of the whole change, for entries of B of this size."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    base = experts.gate_up_proj.detach().double()
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_parameters=["experts.gate_up_proj"]))
    factors = {name.split(".default")[0][-1]: each for name, each in adapted.named_parameters() if "lora_" in name}
    with torch.no_grad():
        factors["B"].copy_(size * torch.randn_like(factors["B"]).sign())
    assert factors["A"].dtype == factors["B"].dtype == torch.float32
    a = factors["A"].detach().view(2, 16, -1)
    b = factors["B"].detach().view(len(factors["B"]), 16, 2).permute(2, 0, 1)
    change, seen = (b @ a).double(), []
    experts.register_forward_pre_hook(lambda module, _: seen.append(module.gate_up_proj.detach().double()))
    with torch.no_grad():
        adapted(input_ids=torch.arange(16).unsqueeze(0))
    moved = seen[0] - base
    return float((moved != 0).double().mean()), float((moved - change).norm() / change.norm())


print("peft", version("peft"), "transformers", version("transformers"), "torch", version("torch"))
found = {size: used(size) for size in (1e-5, 1e-4, 1e-2)}
for size, (moved, error) in found.items():
    print(f"entries of B {size:g}: {moved:.1%} of the experts' weights move, relative error of the change {error:.2f}")
assert found[1e-5][0] < 0.05 and found[1e-5][1] > 0.95
assert 0.7 < found[1e-4][1] < 0.95
assert found[1e-2][1] < 0.05
PY
