#!/usr/bin/env bash
# Transformers 5.19: with rotary embeddings of the type `longrope` (Phi-3, Phi-4-mini) or `dynamic`, log-probabilities of a row depend on the longest
# row of its batch, padding included, and those of its first tokens on how many follow: the frequencies of all rows of a forward pass are
# chosen by the largest position in it. So tokens that were sampled within the limit are scored differently after the row has passed it, and
# a short answer next to a long one. There is no message. A good guess would be that rows of a batch are independent and that a causal model's
# log-probabilities do not depend on later tokens, as with all other types.
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
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
LIMIT, SHORT, LONG = 32, 16, 48
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LIMIT}
MODELS = {
    "Llama, yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, max_position_embeddings=4 * LIMIT, rope_parameters=YARN)),
    "Llama, dynamic": (LlamaForCausalLM, LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=DYNAMIC)),
    "Phi-3, longrope": (
        Phi3ForCausalLM,
        Phi3Config(**SIZES, max_position_embeddings=4 * LIMIT, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE),
    ),
}
ids = torch.randint(3, 90, (LONG,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def differences(kind, config):
    """Largest differences of a row's first tokens: with later ones, and next to a row that has them."""
    torch.manual_seed(0)
    model = kind(config).eval()
    mask = torch.ones(2, LONG, dtype=torch.long)
    mask[1, SHORT:] = 0
    alone = model(ids[None, :SHORT]).logits.log_softmax(-1)[0]
    batched = model(torch.stack([ids, ids]), attention_mask=mask).logits.log_softmax(-1)[:, :SHORT]
    return (batched - alone).abs().amax(dim=(1, 2)).tolist()


print(f"transformers {version('transformers')}, torch {version('torch')}, limit {LIMIT} tokens")
for name, (kind, config) in MODELS.items():
    followed, neighbor = differences(kind, config)
    print(f"{name}: {SHORT} tokens with {LONG - SHORT} more: {followed:.2g} nats; next to a row of {LONG}: {neighbor:.2g} nats")
    assert max(followed, neighbor) < 1e-4 if "yarn" in name else min(followed, neighbor) > 0.05
PY
if grep -qi "batch\|longest\|neighbor" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message"
