#!/usr/bin/env bash
# Transformers 5.19: with `split_special_tokens=True`, a tokenizer is documented to tokenize the text of a special token as text:
# `tokenize("<s>")` gives the pieces of the text. A byte-level BPE tokenizer does so. A Unigram tokenizer (T5, XLM-R and others that
# come from SentencePiece) gives the special token itself if its vocabulary has it, which is the usual case. There is no message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = ["the answer is forty two </ s > <"] * 3


def wrapped(core):
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram():
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return wrapped(core)


def byte_level():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return wrapped(core)


print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
found = {}
for make in (byte_level, unigram):
    tokenizer = make()
    found[make.__name__] = tokenizer.tokenize("a </s> b", split_special_tokens=True)
    print(f"{make.__name__}: {found[make.__name__]}")
assert "</s>" not in found["byte_level"], "a byte-level tokenizer keeps the special token too"
assert "</s>" in found["unigram"], "a Unigram tokenizer splits the text of the special token"
PY
