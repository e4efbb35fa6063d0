"""N-gram speculation in vLLM: the tokens, log-probabilities and versions are those of the policy, in fewer engine steps."""

import asyncio

import numpy as np
import pytest
import torch
from readable_model import EOS, LENGTH, batch_of, completions, expected_logprobs, found_logprobs, plain_scores, rows_of
from tiny_models import take_step
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm.config import VllmConfig, VllmEngineConfig
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.vllm

ROWS, NEW = 32, 64
SPECULATION = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def repetitive(readable, tmp_path_factory):
    """The readable model with sharper distributions, so that it repeats itself; its folder."""
    folder = tmp_path_factory.mktemp("repetitive")
    model = AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(5.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(readable).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(engines, repetitive):
    return engines(model_name=repetitive, temperature=1.0, max_new_tokens=NEW, ngram_speculation=SPECULATION)


@pytest.fixture
def accepted(monkeypatch):
    """Number of proposed tokens that were accepted: each row gets one token per step without them."""
    from rl_backends_vllm.executors import NgramProposer

    counts, propose = [], NgramProposer.propose

    def counted(self, sampled, *arguments, **keywords):
        counts.extend(len(new) - 1 for new in sampled if new)
        return propose(self, sampled, *arguments, **keywords)

    monkeypatch.setattr(NgramProposer, "propose", counted)
    return counts


def prompts(**columns):
    return batch_of(*[[5, 6, 7, 8] * 3] * ROWS, sample_seeds=torch.arange(ROWS), **columns)


def test_sampled_rows_follow_the_policys_distribution_and_report_its_log_probabilities(engine, repetitive, accepted):
    plain = AutoModelForCausalLM.from_pretrained(repetitive, dtype=torch.float32)
    output = engine.generate(prompts())
    assert sum(accepted) > 0.05 * len(accepted)
    # Float32 sums in another order, times the sharper norm.
    torch.testing.assert_close(found_logprobs(output), expected_logprobs(plain, output, temperature=1.0), atol=1e-4, rtol=0)
    # The surprisal of a token has the entropy as its mean: the sum of the differences is a martingale. A sampler that accepts
    # every proposal, or none, is tens of standard deviations away; the seeds are fixed.
    difference, variance = 0.0, 0.0
    for prompt, tokens, _ in rows_of(output):
        with torch.no_grad():
            logprobs = plain(tokens[None]).logits[0, prompt - 1 : -1].double().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        surprisal = -logprobs.gather(1, tokens[prompt:, None])[:, 0]
        difference += float((surprisal - entropy).sum())
        variance += float((logprobs.exp() * (logprobs + entropy[:, None]) ** 2).sum())
    assert abs(difference) < 4 * variance**0.5
    assert completions(engine.generate(prompts())) == completions(output)
    [alone] = completions(engine.generate(prompts().select_indices(torch.tensor([3]))))
    assert alone == completions(output)[3]


def test_greedy_rows_and_stops_are_those_of_single_steps(engine, repetitive, accepted):
    plain = AutoModelForCausalLM.from_pretrained(repetitive, dtype=torch.float32)
    tokens = [5, 6, 7, 8] * 3
    with torch.no_grad():
        while len(tokens) < 12 + 24 and tokens[-1] != EOS:
            tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
    few = torch.tensor([24, 9, 24])
    stops = [{"stop_token_ids": []}, {"stop_token_ids": []}, {"stop_token_ids": [tokens[22]]}]
    batch = batch_of(*[tokens[:12]] * 3, max_new_tokens=few, sampling=stops)
    rows = completions(engine.generate(batch, greedy=True))
    assert rows == [tokens[12:], tokens[12:21], tokens[12 : tokens.index(tokens[22], 12) + 1]]
    assert sum(accepted) > 0


def test_each_token_of_a_row_in_progress_at_a_refit_has_the_version_whose_weights_score_it(engine, repetitive, tmp_path):
    generation = {"backend": "hf", "temperature": 1.0}
    policy = HuggingFacePolicy(
        config=HFPolicyConfig(
            model_name=repetitive, max_total_sequence_length=LENGTH, generation=generation, optimizer={"kwargs": {"lr": 5e-3}}
        )
    )
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))
    models = {}

    def refit():
        take_step(policy, policy.weight_version + 1)
        sync.sync()
        policy.save_checkpoint(str(tmp_path / str(policy.weight_version)))
        folder = tmp_path / str(policy.weight_version)
        models[policy.weight_version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    async def rows_over_a_refit():
        rows = []
        async for _, row in engine.generate_async(
            batch_of(*[[5, 6, 7, 8] * 3] * 4, max_new_tokens=torch.tensor([9, 64, 64, 64]))
        ):
            if not rows:
                refit()
            rows.append(row)
        return rows

    try:
        refit()
        rows = asyncio.run(rows_over_a_refit())
    finally:
        policy.shutdown()
    spans = set()
    for row in rows:
        [(prompt, tokens, logprobs)] = rows_of(row)
        versions = row["token_versions"][0, prompt : len(tokens)].tolist()
        scores = {version: plain_scores(model, tokens, temperature=1.0)[prompt - 1 :] for version, model in models.items()}
        expected = torch.stack([scores[version][at] for at, version in enumerate(versions)])
        torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=0)
        spans.add(len(set(versions)))
    assert spans == {1, 2}


def test_a_proposal_is_what_followed_the_longest_ngram_where_it_occurred_first():
    from types import SimpleNamespace

    from rl_backends_vllm.executors import NgramProposer

    limits = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    proposer = NgramProposer(SimpleNamespace(additional_config=limits, model_config=SimpleNamespace(max_model_len=9)))
    rows = {
        (1, 2, 9, 3, 2, 8, 1, 2): [9],  # one position is left below the maximum length
        (2, 8, 1, 2, 9, 1, 2): [9, 1],  # the longer n-gram comes first
        (7, 5, 6, 7): [5, 6, 7],
        (4, 4, 4): [4],
        (1, 2, 3): [],
        (1,): [],
    }
    tokens = np.array([[*row, *[0] * (9 - len(row))] for row in rows], dtype=np.int32)
    lengths = np.array([len(row) for row in rows])
    assert proposer.propose([[1]] * len(rows), lengths, tokens) == list(rows.values())
    assert proposer.propose([[]] * len(rows), lengths, tokens) == [[]] * len(rows)


def test_images_and_adapters_are_refused_with_speculation():
    config = VllmConfig(model_name="m", vllm_cfg=VllmEngineConfig(ngram_speculation=SPECULATION))
    assert "not tested with images" in config._image_problem(type("Config", (), {"model_type": "qwen2_vl"}))
    assert "not tested with adapters" in config.adapter_problem(HFPolicyConfig(model_name="m"))
