"""Tokens for which the model's embedding has no row: an error if the run uses them, a warning if it does not."""

from __future__ import annotations

import json
import shutil

import model_folders
import pytest
import torch
from command_line import rlcore

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DataError, WorkerError
from rl_train.algorithms import NLLLossFn
from rl_train.algorithms.supervised_configs import SFTConfig
from rl_train.assembly.checks import tokenizer_warnings
from rl_train.config.schema import DataConfig, LossConfig, RunConfig


@pytest.fixture
def folder(tmp_path):
    """A model of 320 rows whose tokenizer has the further tokens 320 to 322."""
    made = model_folders.make(tmp_path / "model", "added tokens")
    (made / "model.safetensors").unlink()
    model_folders.write_model(made)
    return made


def validate(folder, *rows):
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows))
    train = {"dataset_name": "jsonl", "path": str(data), "response_key": "answer", "output_key": None}
    policy = {"backend": "hf", "model_name": str(folder), "max_total_sequence_length": 64}
    config = folder / "run.yaml"
    config.write_text(json.dumps({"sft": {"global_batch_size": 2}, "policy": policy, "data": {"train": train}}))
    found = rlcore("validate", "--deep", config)
    return found.returncode, found.stdout + found.stderr


def test_tokens_that_the_data_does_not_use_are_only_a_warning(folder):
    code, output = validate(folder, ("1+2=", "3"), ("2+3=", "5"))
    assert code == 0, output
    assert "warning: policy.model_name: 3 of 323 tokens have no row in the embedding" in output
    assert "'<answer>' (320), '</answer>' (321), 'Zaphod' (322)" in output


def test_a_row_with_such_a_token_is_an_error_with_the_token_and_what_to_do(folder):
    code, output = validate(folder, ("1+2=", "3"), ("2+3=", "<answer>5</answer>"))
    assert code == 2
    assert (
        f"jsonl: {folder}/rows.jsonl:2 contains the token '<answer>' (id 320), which has no row in the embedding of " in output
    )
    assert f"{folder} (320 rows)" in output
    assert "resize_token_embeddings" in output


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_an_end_or_padding_token_without_a_row_is_an_error(folder, name):
    model_folders.edit_json(folder / "tokenizer_config.json", **{name: "Zaphod"})
    code, output = validate(folder, ("1+2=", "3"), ("2+3=", "5"))
    assert code == 2
    assert f"the {name[:3].upper()} token 'Zaphod' has id 322, which has no row in the embedding" in output


def test_the_message_names_the_model_with_the_fewest_rows_and_their_number(folder, tmp_path):
    smaller = shutil.copytree(folder, tmp_path / "smaller")
    model_folders.edit_json(smaller / "config.json", vocab_size=300)
    policy, teacher = (PolicyConfig(backend="hf", model_name=str(path)) for path in (folder, smaller))
    tokenizer = load_tokenizer(folder)
    algorithm = {"algorithm": SFTConfig(), "algorithm_name": "sft", "loss_fn": LossConfig()}
    config = RunConfig(policy=policy, teacher=teacher, data=DataConfig(), **algorithm)
    [problem] = tokenizer_warnings(config, tokenizer)
    assert f"23 of 323 tokens have no row in the embedding of {smaller} (300 rows), such as" in problem.message


@pytest.mark.parametrize("form", ["untied", "padded vocabulary", "added tokens"])
def test_rows_of_a_padded_embedding_are_fine(tmp_path, form):
    code, output = validate(model_folders.make(tmp_path / "model", form), ("1+2=", "3"), ("2+3=", "5"))
    assert code == 0, output
    assert "no row" not in output


def test_the_policy_and_the_engine_name_the_id_before_they_compute(folder):
    rows = BatchedDataDict(
        input_ids=torch.tensor([[70, 321, 80]]),
        input_lengths=torch.tensor([3]),
        token_mask=torch.ones(1, 3),
        sample_mask=torch.ones(1),
        sample_seeds=torch.tensor([1]),
    )
    policy = HuggingFacePolicy(str(folder))
    for call in (policy.get_logprobs, lambda data: policy.train(data, NLLLossFn())):
        with pytest.raises(DataError, match=r"token id 321, but the embedding of .* has rows for ids 0 to 319"):
            call(rows)
    with pytest.raises((DataError, WorkerError), match=r"Row 0 has token id 321, but the model's embedding has rows for ids 0"):
        HuggingFaceGeneration(model_name=str(folder), max_new_tokens=2).generate(rows)
