"""Writes an untrained LitGPT model and the tokenizer of the quickstart: `python make_model.py FOLDER`."""

import sys
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from rl_backends_litgpt.model import save

sys.path.insert(0, str(Path(__file__).parents[2] / "addition"))
from make_tokenizer import make_tokenizer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Config(
        name="addition",
        vocab_size=len(tokenizer),
        padding_multiple=64,
        block_size=128,
        n_layer=2,
        n_embd=192,
        n_head=6,
        intermediate_size=768,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = GPT(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.06)
    save(model.state_dict(), config, folder)
    tokenizer.save_pretrained(folder)
