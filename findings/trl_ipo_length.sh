#!/usr/bin/env bash
# TRL 1.16: `loss_type="ipo"` of DPOTrainer divides the log-probability ratio of an answer by its number of tokens, although
# `sigmoid` (DPO) and `hinge` of the same trainer sum it, as all three do in their papers. So `beta` does not mean the same: with
# answers of n tokens, the target of the margin is that of the paper times n. A good guess would be that loss types of one trainer
# differ only in the function of the margin.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.19.0 datasets==5.2.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = {word: number for number, word in enumerate(["<pad>", "<end>", *"abcdef"])}
inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
BETA, LENGTH = 0.1, 8


def policy(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)).double()


def loss_of(kind, ids, mask):
    model, reference = policy(0), policy(1)
    rows = Dataset.from_list([{"prompt": "ab", "chosen": "cd", "rejected": "ef"}] * 2)
    common = {"output_dir": "out", "report_to": [], "use_cpu": True, "bf16": False, "remove_unused_columns": False}
    args = DPOConfig(beta=BETA, loss_type=[kind], **common)
    trainer = DPOTrainer(model=model, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    return trainer.compute_loss(trainer.model, inputs).item()


def summed(model, ids, mask):
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logprobs * mask[:, 1:]).sum(-1)


generator = torch.Generator().manual_seed(0)
ids = torch.randint(2, len(words), (2, 3 + LENGTH), generator=generator)  # a chosen and a rejected answer
ids[1, :3] = ids[0, :3]
mask = torch.tensor([[0] * 3 + [1] * LENGTH] * 2)
with torch.no_grad():
    chosen, rejected = summed(policy(0), ids, mask) - summed(policy(1), ids, mask)
margin = (chosen - rejected).item()
expected = {
    "sigmoid": torch.nn.functional.softplus(torch.tensor(-BETA * margin, dtype=torch.float64)).item(),
    "hinge": max(0.0, 1.0 - BETA * margin),
    "ipo, summed as in the paper": (margin - 1 / (2 * BETA)) ** 2,
    "ipo, divided by the length": (margin / LENGTH - 1 / (2 * BETA)) ** 2,
}
print(f"trl {version('trl')}, transformers {version('transformers')}, torch {version('torch')}")
print(f"margin of the summed log-ratios {margin:.4f}, answers of {LENGTH} tokens")
found = {kind: loss_of(kind, ids, mask) for kind in ("sigmoid", "hinge", "ipo")}
for kind, value in found.items():
    print(f"{kind}: {value:.6f}; " + ", ".join(f"{name}: {number:.6f}" for name, number in expected.items() if name.startswith(kind)))
for kind in ("sigmoid", "hinge"):
    assert abs(found[kind] - expected[kind]) < 1e-5, kind
assert abs(found["ipo"] - expected["ipo, divided by the length"]) < 1e-5
assert abs(found["ipo"] - expected["ipo, summed as in the paper"]) > 0.1
print("as described")
PY
