"""Keys of a Transformers generation config in `policy.generation`."""

from pathlib import Path

import pytest
import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data import BatchedDataDict
from rl_core.errors import RLCoreError

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
EOS = 1
PROMPT = BatchedDataDict({"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 2)})


def test_do_sample_and_the_padding_token_are_accepted_in_a_file_and_as_overrides(files, good):
    loaded = files.load(good.replace("max_new_tokens: 64", "max_new_tokens: 64\n    do_sample: true\n    pad_token_id: 0"))
    assert "do_sample" not in loaded.resolved["policy"]["generation"]
    assert files.load(good, "++policy.generation.do_sample=true").run == loaded.run


def test_an_end_of_sequence_token_of_the_model_is_accepted():
    generation = {"backend": "hf", "max_new_tokens": 3}
    for accepted in (EOS, None):
        engine = HuggingFaceGeneration(str(MODEL), **{**generation, "eos_token_id": accepted})
        assert engine.generate(PROMPT)["generation_lengths"].min() > 0
        engine.shutdown()
    policy = HuggingFacePolicy(str(MODEL), generation={**generation, "eos_token_id": EOS})
    assert policy.generate(PROMPT)["generation_lengths"].min() > 0
    policy.shutdown()


def test_another_end_of_sequence_token_is_an_error_that_names_the_key_for_further_tokens():
    refused = rf"eos_token_id is 3, but the end-of-sequence tokens of the model are \[{EOS}\].* or use stop_token_ids"
    engine = HuggingFaceGeneration(str(MODEL), backend="hf", eos_token_id=3, stop_token_ids=[3])
    with pytest.raises(RLCoreError, match=refused):
        engine.generate(PROMPT)
    engine.shutdown()
