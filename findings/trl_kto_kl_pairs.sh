#!/usr/bin/env bash
# TRL 1.16.0: KTO's estimate of the KL divergence needs prompts with answers to other prompts. TRL makes these pairs in the order of the file:
# each prompt gets the answer of the row before it, within groups of the batch size. If the answers to a prompt stand next to each other in the
# file, which is how they are sampled and written, most of these pairs are a prompt with another of its own answers. There is no message. A
# good guess would be that the answer always belongs to another prompt, or that rows are shuffled first; they are not, in any epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 trl==1.16.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
import random
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import KTOConfig, KTOTrainer

torch.set_num_threads(1)
PROMPTS, ANSWERS = 16, 4
WORDS = [*(f"q{n}" for n in range(PROMPTS)), *(f"a{n}" for n in range(PROMPTS * ANSWERS)), "[EOS]", "[PAD]", "[UNK]"]
# Each prompt has four answers of its own, two that were liked and two that were not.
ROWS = [
    {"prompt": f"q{prompt} ", "completion": f"a{ANSWERS * prompt + n} a{ANSWERS * prompt + n}", "label": n % 2 == 0}
    for prompt in range(PROMPTS)
    for n in range(ANSWERS)
]


def trained(rows):
    """How many pairs have an answer to the same prompt, and the mean KL estimate of the last of five epochs."""
    set_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)).save_pretrained("model")
    steps = {"per_device_train_batch_size": 8, "num_train_epochs": 5, "learning_rate": 1e-3, "logging_steps": 1}
    config = KTOConfig(output_dir="out", report_to="none", use_cpu=True, save_strategy="no", bf16=False, max_length=32, **steps)
    trainer = KTOTrainer(
        model=LlamaForCausalLM.from_pretrained("model"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    answers = {}
    for row in trainer.train_dataset:
        answers.setdefault(tuple(row["prompt_ids"]), set()).add(tuple(row["completion_ids"]))
    assert len(answers) == PROMPTS
    own = sum(tuple(row["KL_completion_ids"]) in answers[tuple(row["prompt_ids"])] for row in trainer.train_dataset)
    trainer.train()
    estimates = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    return own, sum(estimates[-len(rows) // 8 :]) / (len(rows) // 8)


print(f"trl {version('trl')}, transformers {version('transformers')}")
found = {}
for name, rows in (("by prompt", ROWS), ("shuffled", random.Random(0).sample(ROWS, len(ROWS)))):
    found[name] = trained(rows)
    print(f"{name}: {found[name][0]} of {len(rows)} pairs have an answer to the same prompt; KL estimate at the end {found[name][1]:.3f}")
assert found["by prompt"][0] == 48 and found["shuffled"][0] < 16
PY
if grep -qi "mismatch\|shuffl\|same prompt" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message about the pairs"
