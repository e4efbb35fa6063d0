"""Writes the quickstart tokenizer. Each character is a token: `12+34=` has six tokens and its answer two plus eos.

python examples/addition/make_tokenizer.py examples/addition/tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*= "
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template without roles: a question is its content, an answer its content and eos."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; 18 tokens."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    characters = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    characters.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Write the quickstart tokenizer.")
    arguments.add_argument("folder", type=Path)
    make_tokenizer().save_pretrained(arguments.parse_args().folder)
