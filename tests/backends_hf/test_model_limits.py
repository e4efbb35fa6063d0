"""Models that Transformers computes in another way than others: rotary embeddings that depend on lengths, no SDPA kernel."""

import pytest
import torch
import transformers

from rl_backends_hf import HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import UserError, WorkerError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def save(config, folder):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["longrope", "dynamic"])
def depends_on_lengths(request, tmp_path):
    """A model whose rotary frequencies change beyond 16 tokens."""
    if request.param == "longrope":
        limits = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
        return save(transformers.Phi3Config(**SIZES, **limits, rope_parameters=LONGROPE), tmp_path)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return save(transformers.LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=rope), tmp_path)


def test_rows_whose_frequencies_would_depend_on_their_neighbors_are_refused(depends_on_lengths):
    says = r"change for all rows of a microbatch .* more than 16 tokens.*from 26 to 16"
    with pytest.raises((UserError, WorkerError), match=says):
        HuggingFacePolicy(depends_on_lengths, max_total_sequence_length=26).wait_ready()


def test_shorter_rows_of_such_a_model_do_not_depend_on_their_neighbors(depends_on_lengths):
    lengths = torch.tensor([16, 9, 12])
    ids = torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(1))
    rows = BatchedDataDict(input_ids=ids * (torch.arange(16) < lengths[:, None]), input_lengths=lengths)
    scores = []
    for size in (3, 1):
        policy = HuggingFacePolicy(depends_on_lengths, max_total_sequence_length=16, logprob_batch_size=size)
        scores.append(policy.get_logprobs(rows)["logprobs"])
    assert (scores[0] - scores[1]).abs().max() < 1e-5  # float32; a change of the frequencies is more than 0.1


def test_a_model_without_sdpa_loads_with_eager_and_is_refused_with_sdpa(tmp_path):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    folder = save(config, tmp_path)
    with pytest.raises((UserError, WorkerError), match=r"attn_implementation: eager"):
        HuggingFacePolicy(folder, max_total_sequence_length=16, attn_implementation="sdpa").wait_ready()
    rows = BatchedDataDict(input_ids=torch.tensor([[3, 4, 5]]), input_lengths=torch.tensor([3]))
    policy = HuggingFacePolicy(folder, max_total_sequence_length=16)
    assert policy.get_logprobs(rows)["logprobs"].isfinite().all()
