#!/usr/bin/env bash
# TRL 1.16 with Transformers 5.19: GRPO with `use_transformers_continuous_batching` and `bf16=True`, the default, converts the trained model to bfloat16
# in place before it samples, and does not convert it back. So from the first rollout on, the optimizer has no float32 weights to update: at the default
# learning rate of 1e-6, almost all updates are rounded away. The rotary frequencies become bfloat16 as well. Without continuous batching, the same
# settings train float32 weights. There is no message. A good guess would be that the option changes how answers are sampled and nothing that is trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.19.0 datasets==5.2.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

WORDS = {word: number for number, word in enumerate(["<pad>", "<end>", "<unk>", *"abcdefgh"])}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def share_of_a(completions, **_):
    return [float(text.count("a")) for text in completions]


def trained(continuous):
    """Data types of weights and rotary frequencies, and the share of the weights that differ, after two steps."""
    set_seed(0)
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), eos_token_id=1, pad_token_id=0, **SIZES))
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    steps = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 2}
    args = GRPOConfig(
        output_dir="out",
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        gradient_checkpointing=False,
        use_transformers_continuous_batching=continuous,
        transformers_continuous_batching_config={"num_blocks": 8, "max_batch_tokens": 256},
        **steps,
    )
    assert args.bf16 and args.learning_rate == 1e-6
    rows = Dataset.from_list([{"prompt": "ab"}, {"prompt": "cd"}] * 8)
    trainer = GRPOTrainer(model=model, args=args, reward_funcs=share_of_a, train_dataset=rows, processing_class=tokenizer)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train()
    moved = (weight != before.to(weight.dtype)).float().mean().item()
    return weight.dtype, model.model.rotary_emb.inv_freq.dtype, moved


print(f"trl {version('trl')}, transformers {version('transformers')}, torch {version('torch')}")
for continuous in (False, True):
    dtype, frequencies, moved = trained(continuous)
    print(f"continuous batching {continuous}: weights {dtype}, rotary frequencies {frequencies}, {moved:.1%} of the weights moved")
    expected = torch.bfloat16 if continuous else torch.float32
    assert dtype == frequencies == expected
    assert moved < 0.05 if continuous else moved > 0.9
PY
if grep -qi "bfloat16\|bf16" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message"
