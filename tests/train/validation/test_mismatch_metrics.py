"""Mismatch metrics of sampler and policy are one number per step, with any microbatches and ranks."""

import math

import pytest
import torch

from rl_backends_hf import HuggingFacePolicy
from rl_core.cluster import RayVirtualCluster
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses import ClippedPGLossFn

FULL = pytest.mark.full("backends_base/dispatch/test_facades.py combines the metrics of ranks")


@pytest.fixture(params=["in this process", pytest.param("over two ranks", marks=[pytest.mark.ray, FULL])])
def trainer(request, policy):
    if request.param == "in this process":
        yield policy()
        return
    request.getfixturevalue("local_ray")
    with RayVirtualCluster([2]) as cluster:
        made = HuggingFacePolicy(policy().config.model_name, cluster=cluster)
        yield made
        made.shutdown()


def rows_for(policy, differences):
    """Rows with one prompt token, sampled with log-probabilities that differ from the policy's by `differences`."""
    length = len(differences[0])
    ids = 3 + torch.arange(len(differences) * (length + 1)).view(len(differences), length + 1) % 10
    lengths = torch.full((len(differences),), length + 1)
    scores = policy.get_logprobs(BatchedDataDict({"input_ids": ids, "input_lengths": lengths}))["logprobs"]
    mask = torch.ones(len(differences), length + 1)
    mask[:, 0] = 0.0
    d = torch.nn.functional.pad(torch.tensor(differences), (1, 0))
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(len(differences)),
            "advantages": mask,
            "prev_logprobs": scores,
            "generation_logprobs": scores - d,
        }
    )


def test_the_mean_is_over_all_tokens_and_the_largest_is_the_largest_of_all(trainer):
    # The maximum is in the first of five rows: not in the last microbatch or rank.
    differences = [[0.0, -0.9, 0.1], [0.2, 0.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.0], [0.1, 0.1, -0.1]]
    batch = rows_for(trainer, differences)
    metrics = trainer.train(batch, ClippedPGLossFn(), eval_mode=True, mbs=2)["metrics"]
    d = [x for row in differences for x in row]
    # Log-probabilities are float32 of a few nats, so a difference of them is good to about 1e-6.
    assert metrics["mismatch/max"] == pytest.approx(0.9, abs=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d), abs=1e-5)
    assert metrics["mismatch/mult_prob_error"] == pytest.approx(sum(math.exp(abs(x)) for x in d) / len(d), abs=1e-5)


def test_masked_tokens_do_not_count_as_mismatch(policy):
    trainer = policy()
    batch = rows_for(trainer, [[0.0, 5.0], [0.0, 0.25]])
    batch["token_mask"][0, 2] = 0.0
    batch["generation_logprobs"][0, 2] = -math.inf
    assert trainer.train(batch, ClippedPGLossFn(), eval_mode=True)["metrics"]["mismatch/max"] == pytest.approx(0.25, abs=1e-5)


def test_each_optimizer_step_of_a_batch_counts_and_the_largest_of_them_stays(policy):
    trainer = policy(train_global_batch_size=1)
    batch = rows_for(trainer, [[0.5, 0.0], [0.0, 0.0]])
    result = trainer.train(batch, ClippedPGLossFn(), eval_mode=True)
    assert result["num_optimizer_steps"] == 2
    assert result["metrics"]["mismatch/max"] == pytest.approx(0.5, abs=1e-5)
