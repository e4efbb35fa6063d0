"""Writes an untrained recurrent model and the tokenizer of the quickstart: `python make_model.py FOLDER`."""

import sys
from pathlib import Path

import torch
from rl_backends_recurrent.model import RecurrentModel

sys.path.insert(0, str(Path(__file__).parents[2] / "addition"))
from make_tokenizer import make_tokenizer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    RecurrentModel(vocab_size=len(tokenizer), hidden_size=256, num_layers=2).save(folder)
    tokenizer.save_pretrained(folder)
