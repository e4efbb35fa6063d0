"""Runs that train on tokens of older weights: what is compared, reported and scored. Every second refit is left out."""

import json

import pytest
from short_runs import merged

from rl_backends_hf import HuggingFacePolicy
from rl_train.training_checks.agreement import Agreement, Numbers
from rl_train.training_checks.checks import ENOUGH_TOKENS, TrainingChecks
from rl_train.weight_sync.synchronizer import WeightSynchronizer

STALE = {
    "grpo": {"max_num_steps": 5},
    "policy": {"optimizer": {"kwargs": {"lr": 1e-3}}, "generation": {"refit_transport": "shared_memory"}},
}


@pytest.fixture
def scored_rows(monkeypatch):
    """Rows of each call of the policy's scoring pass, without those of the canary."""
    calls, scored = [], HuggingFacePolicy.get_logprobs

    def get_logprobs(self, data, *args, **kwargs):
        if "token_mask" in data:
            calls.append(data.size)
        return scored(self, data, *args, **kwargs)

    monkeypatch.setattr(HuggingFacePolicy, "get_logprobs", get_logprobs)
    return calls


@pytest.fixture
def every_second_refit(monkeypatch):
    """Refits before the first, third and fifth step only."""
    calls, sync = [], WeightSynchronizer.sync

    def sometimes(self, **kwargs):
        calls.append(kwargs)
        return sync(self, **kwargs) if len(calls) % 2 else {}

    monkeypatch.setattr(WeightSynchronizer, "sync", sometimes)


@pytest.mark.usefixtures("every_second_refit")
def test_a_step_of_older_weights_is_not_compared_but_the_next_refit_runs_the_canary(train):
    code, output, metrics = train(merged(STALE, {"loss_fn": {"ratio_to": "sampler"}}))
    assert code == 0, output
    assert [step["staleness/max"] for step in metrics] == [0, 1, 0, 1, 0]
    assert ["agreement/mean" in step for step in metrics] == [True, False, True, False, True]
    # The first refit always runs it, those after a stale step because nothing was compared in that step.
    assert ["refit/canary_error" in step for step in metrics] == [True, False, True, False, True]
    for number, step in enumerate(metrics):
        fresh = number % 2 == 0
        assert ("mismatch/kl" in step, "mismatch/max" in step, "staleness/kl" in step) == (fresh, fresh, not fresh)
        # One optimizer step at 1e-3 moves the policy much further than float32 rounding.
        assert step["mismatch/kl"] < 1e-9 if fresh else step["staleness/kl"] > 1e-6
        assert fresh or step["staleness/token_frac"] == pytest.approx(1.0)


@pytest.mark.slow
def test_the_ratio_to_the_sampler_needs_no_scoring_pass_with_several_optimizer_steps(train, scored_rows, tmp_path):
    several = {"policy": {"train_global_batch_size": 8}}
    code, output, to_policy = train(several)
    assert code == 0, output
    assert scored_rows == [32, 32, 32]
    scored_rows.clear()
    code, output, to_sampler = train(merged(several, {"loss_fn": {"ratio_to": "sampler"}}))
    assert code == 0, output
    assert scored_rows == []
    first = sorted((tmp_path / "runs").glob("*/rollouts"), key=lambda folder: folder.stat().st_mtime)[-1]
    assert all(json.loads(line)["policy_logprobs"] is None for line in (first / "step_000001.jsonl").read_text().splitlines())
    assert "mismatch/kl" not in to_sampler[0]
    # Engine and policy compute the same log-probabilities up to float32 rounding, so the ratios are the same up to it.
    for name in ("loss", "grad_norm", "ratio/max", "ratio/clipped_frac"):
        assert to_sampler[0][name] == pytest.approx(to_policy[0][name], rel=1e-3, abs=1e-5), name


def test_a_penalty_in_the_reward_still_scores_and_a_scoring_pass_without_use_is_refused(train, scored_rows):
    penalty = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1, "ratio_to": "sampler"}
    code, output, metrics = train({"loss_fn": penalty, "grpo": {"max_num_steps": 1}})
    assert code == 0, output
    assert scored_rows == [32]
    assert "mismatch/kl" in metrics[0]
    code, output, _ = train({"loss_fn": {"ratio_to": "sampler"}, "grpo": {"skip_logprobs_when_on_policy": False}})
    assert code == 2
    assert "does not use the log-probabilities of a scoring pass" in output


class _Requests:
    """Counts requests of the canary."""

    number = 0

    def request_canary(self):
        self.number += 1


@pytest.mark.parametrize(
    ("tokens", "is_stale", "expected"),
    [
        (ENOUGH_TOKENS, True, [0, 0, 0]),
        (ENOUGH_TOKENS - 1, True, [1, 2, 3]),
        (ENOUGH_TOKENS - 1, False, [0, 0, 0]),
        (0, True, [1, 2, 3]),
        (0, False, [1, 1, 1]),
    ],
)
def test_the_canary_replaces_a_comparison_of_too_few_tokens_if_older_weights_sampled_others(tokens, is_stale, expected):
    steps, weights = [], _Requests()
    checks = TrainingChecks(
        step=lambda: steps[-1],
        record=lambda _: None,
        weights=weights,
        agreement=Agreement(sides="float32", exact=True, has_canary=True),
    )
    numbers = Numbers(tokens=tokens, mean=0.0, worst_row=0.0, row=0, invalid=0, refused=False, doubtful=False)
    found = []
    for step in (1, 2, 3):
        steps.append(step)
        checks.count(numbers, is_stale=is_stale)
        checks.count(None, is_stale=is_stale)  # a further epoch of the same step
        found.append(weights.number)
    assert found == expected
