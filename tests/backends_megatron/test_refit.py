"""Experts sharded over two ranks reach both engines, which compute the same as Transformers with these weights."""

import megatron_cases as cases
import pytest
import torch
import transformers

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import NLLLossFn
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.full("test_parity.py exports the experts of ranks; backends_vllm/test_refit.py refits with experts"),
]

LENGTH = 48
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    # The minimum of vLLM's attention on a CPU.
    "head_dim": 32,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
MIXTURES = {
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
}


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def mixture(request, tmp_path_factory):
    """A policy on two ranks with half of the experts each, after one step; its folder, and where that step is saved."""
    from rl_backends_megatron import MegatronPolicy

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(MIXTURES[request.param](), dtype=torch.float32).save_pretrained(folder)
    policy = MegatronPolicy(
        str(folder),
        num_workers=2,
        expert_model_parallel_size=2,
        max_total_sequence_length=LENGTH,
        optimizer={"kwargs": {"lr": 1e-2}},
    )
    rows = cases.make_rows(8)
    rows["input_ids"] %= SIZES["vocab_size"]
    policy.prepare_for_training()
    policy.train(rows, NLLLossFn())
    policy.save_checkpoint(folder / "stepped")
    yield policy, str(folder), folder / "stepped"
    policy.shutdown()


def hf(folder, **settings):
    from rl_backends_hf import HuggingFaceGeneration

    return HuggingFaceGeneration(folder, max_new_tokens=8, **settings)


def vllm(folder, **settings):
    from rl_backends_vllm import VllmConfig, VllmGeneration

    cfg = {"precision": "float32", "max_model_len": LENGTH, "max_num_seqs": 8, **settings}
    return VllmGeneration(config=VllmConfig(model_name=folder, max_new_tokens=8, vllm_cfg=cfg))


def sync(policy, engine):
    synchronizer = WeightSynchronizer(
        policy,
        engine,
        # Less than the experts of a layer: they arrive in several buckets.
        WeightSender(policy, SharedMemoryTransport, buffer_bytes=64 * 1024),
        canary=RefitCanary(lambda: make_canary(range(3, SIZES["vocab_size"]), num_receivers=1, max_length=LENGTH, exact=True)),
    )
    try:
        return synchronizer.sync()
    finally:
        synchronizer.close()


@pytest.mark.parametrize("engine", [hf, pytest.param(vllm, marks=pytest.mark.vllm)])
def test_experts_of_two_ranks_arrive_in_the_engine_and_it_samples_with_them(mixture, engine):
    policy, before, after = mixture
    made = engine(before)
    try:
        found = sync(policy, made)
        prompts = BatchedDataDict(input_ids=torch.tensor([[5, 9, 11], [7, 8, 12]]), input_lengths=torch.tensor([3, 3]))
        answer = made.generate(prompts, greedy=True)
    finally:
        made.shutdown()
    assert found["refit/canary_error"] < 1e-5
    assert found["refit/weight_version"] == 1
    rows = BatchedDataDict(input_ids=answer["output_ids"], input_lengths=answer["unpadded_sequence_lengths"])
    drawn = answer["logprobs"] != 0
    with torch.no_grad():
        expected, stale = (cases.plain_logprobs(cases.plain_model(folder), rows) for folder in (after, before))
    assert float((answer["logprobs"] - expected)[drawn].abs().max()) < 1e-5
    assert float((answer["logprobs"] - stale)[drawn].abs().max()) > 1e-2


def test_both_policies_send_the_same_weights_under_the_same_names(mixture):
    from rl_backends_hf import HuggingFacePolicy

    policy, _, after = mixture
    other = HuggingFacePolicy(str(after))
    assert dict(policy.prepare_refit_info()) == dict(other.prepare_refit_info())
    assert policy.weight_fingerprint() == other.weight_fingerprint()
    assert "experts.3." in " ".join(policy.prepare_refit_info())
