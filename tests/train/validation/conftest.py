"""The quickstart model, and copies of it with some tensors changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture
def changed_model(tmp_path):
    """A copy of the model after `change(tensors)`; its config with `fields` replaced."""

    def make(change=lambda tensors: None, **fields):
        folder = tmp_path / "changed"
        shutil.copytree(MODEL, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return str(folder)

    return make


@pytest.fixture
def started():
    """Makes policies and engines in this process, and ends them."""
    made = []

    def start(kind, model=str(MODEL), **fields):
        made.append(kind(model, **fields))
        return made[-1]

    yield start
    for backend in made:
        backend.shutdown()


@pytest.fixture
def policy(started):
    return lambda model=str(MODEL), **fields: started(HuggingFacePolicy, model, **fields)


@pytest.fixture
def engine(started):
    return lambda model=str(MODEL), **fields: started(HuggingFaceGeneration, model, **{"max_new_tokens": 24, **fields})


@pytest.fixture
def prompts(tokenizer):
    """Sums as a batch: [B, T] with lengths and seeds."""
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("12+34=", "7+5=", "99+1=", "40+40=", "3*3=", "88-8=")]
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "sample_seeds": torch.arange(len(rows)),
        }
    )
