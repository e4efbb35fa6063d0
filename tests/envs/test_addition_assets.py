"""Tokenizer and untrained model of the quickstart: Transformers loads them, and text survives encoding and decoding."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_envs.arithmetic import ArithmeticDataset

ADDITION = Path(__file__).parents[2] / "examples" / "addition"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("addition") / "model"
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.syspath_prepend(str(ADDITION))
        patch.setattr(sys, "argv", ["make_init_model.py", str(folder)])
        runpy.run_path(str(ADDITION / "make_init_model.py"), run_name="__main__")
    return folder


@pytest.mark.slow
def test_questions_are_tokenized_by_character_and_answers_end_with_eos(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert prompt == "12+34="
    assert whole == [*tokenizer("12+34=")["input_ids"], *tokenizer("46")["input_ids"], tokenizer.eos_token_id]
    assert len(whole) == 9


def test_every_generated_text_survives_the_tokenizer(made):
    tokenizer = AutoTokenizer.from_pretrained(made)
    dataset = ArithmeticDataset({"operations": ["+", "-", "*"], "with_response": True, "num_samples": 300})
    texts = [message["content"] for i in range(300) for message in dataset[i]["messages"]]
    ids = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(ids) == texts
    assert not any(tokenizer.unk_token_id in row for row in ids)


def test_transformers_loads_the_untrained_model_with_the_eos_token_of_the_tokenizer(made):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
