#!/usr/bin/env bash
# Transformers 5.19: `AutoTokenizer.from_pretrained` of a folder whose tokenizer_config.json names `LlamaTokenizerFast` takes only the
# vocabulary and the post-processor from its tokenizer.json. Pre-tokenizer, decoder and settings of the BPE model are those of the class,
# so a byte-level tokenizer.json loses its spaces, without a message. `GPT2Tokenizer` drops a pre-tokenizer of digits in the same way. A
# good guess would be that the tokenizer of a complete tokenizer.json is that of the file, as in Transformers 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 tokenizers==0.23.3
cd "$folder"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer


def loaded(name, pre_tokenizer, text):
    """Tokens of a text with the tokenizer.json, and with what Transformers loads for the class."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, "12", "<s>", "</s>", "<unk>", "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    Path(name).mkdir()
    tokenizer.save(f"{name}/tokenizer.json")
    Path(f"{name}/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    read = AutoTokenizer.from_pretrained(name)
    of_file, of_class = tokenizer.encode(text).tokens, read.tokenize(text)
    print(f"{name} {text!r}: tokenizer.json has {of_file}, Transformers {of_class}, decoded {read.decode(read(text)['input_ids'])!r}")
    return of_file, of_class


print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
assert loaded("LlamaTokenizerFast", byte_level, "a 12 b") == (["a", "Ġ", "12", "Ġ", "b"], ["a", "12", "b"])
digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
assert loaded("GPT2Tokenizer", digits, "12") == (["1", "2"], ["12"])
PY
