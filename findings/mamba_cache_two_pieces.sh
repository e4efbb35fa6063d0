#!/usr/bin/env bash
# Transformers 5.19: Mamba, Falcon Mamba and Jamba forget their recurrent state if a cache is continued with several tokens at once, as in a prefill
# by pieces or the next turn of a conversation: the state enters only passes of one token, and longer ones start from zero. So the same tokens have
# other log-probabilities in two pieces than in one, without a message. Mamba 2, Falcon H1 and Qwen3-Next continue the state, and all of them do
# token by token. A good guess would be that a cache that a model returns can be continued by any number of tokens, as one of keys and values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet transformers==5.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {**SIZES, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_ssm": 64}
FAMILIES = {
    "mamba": {**SIZES, "state_size": 8},
    "falcon_mamba": {**SIZES, "state_size": 8},
    "jamba": {**HEADS, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "mamba2": {**SIZES, "state_size": 8, "head_dim": 16, "num_heads": 4, "n_groups": 1, "expand": 2},
    "falcon_h1": {**HEADS, **WIDE, "head_dim": 8},
}
FORGET = ("mamba", "falcon_mamba", "jamba")
ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(model, ends):
    """Largest difference of log-probabilities in pieces that end there from those of one pass."""
    key = "cache_params" if model.config.model_type in ("mamba", "falcon_mamba", "mamba2") else "past_key_values"
    cache, logits, start = {}, [], 0
    for end in ends:
        output = model(ids[:, start:end], use_cache=True, **cache)
        cache, start = {key: getattr(output, key)}, end
        logits.append(output.logits)
    whole = model(ids, use_cache=False).logits
    return (torch.cat(logits, 1).log_softmax(-1) - whole.log_softmax(-1)).abs().max().item()


print(f"transformers {version('transformers')}, torch {version('torch')}")
for family, sizes in FAMILIES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tokens, pieces = difference(model, range(12, 21)), difference(model, (12, 20))
    print(f"{family}: 12 tokens and 8 single ones {tokens:.1e} nats, 12 tokens and 8 at once {pieces:.1e} nats")
    assert tokens < 1e-3 and (pieces > 0.1 if family in FORGET else pieces < 1e-3)
PY
if grep -qi "state\b.*\(ignored\|reset\)" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message about the state"
