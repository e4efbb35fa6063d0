"""Shared fixtures of the data tests: a small real tokenizer, and random batches."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))

from template_styles import CHATML

# The machine is shared, so a slow example is not an error.
settings.register_profile("shared", deadline=None, max_examples=60)
settings.load_profile("shared")


def byte_level_bpe() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the answer is forty two and the question is what is six times seven"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>", bos_token="<|im_start|>")


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def library_cache(tmp_path_factory):
    """The cache of the library is removed with the tests."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
