#!/usr/bin/env bash
# Transformers 5.19: Gemma 2 and VaultGemma accept `attn_implementation="sdpa"`, which is also their default, and then leave out the cap of
# attention logits that their config asks for (`attn_logit_softcapping`), without a message. A good guess would be that an attention which a
# class accepts computes the same function as `eager`, as it does for the other families.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


def logprobs(attention, cap):
    config = Gemma2Config(
        **SIZES, num_key_value_heads=2, vocab_size=96, initializer_range=0.3, query_pre_attn_scalar=8, attn_logit_softcapping=cap
    )
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.config._attn_implementation, model(ids).logits.log_softmax(-1)


_, capped = logprobs("eager", 1.0)
default, found = logprobs(None, 1.0)
_, uncapped = logprobs("eager", None)
print(f"transformers {version('transformers')}, torch {version('torch')}")
print(f"default attention of Gemma 2: {default}")
print(f"largest difference with a cap of 1.0, {default} against eager: {(found - capped).abs().max():.3f} nats")
print(f"{default} with the cap against eager without any cap: {(found - uncapped).abs().max():.1e} nats")
assert default == "sdpa"
assert (found - capped).abs().max() > 0.5
assert (found - uncapped).abs().max() < 1e-3
PY
if grep -qi softcap "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message about the cap"
