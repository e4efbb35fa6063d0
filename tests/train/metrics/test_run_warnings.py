"""Warnings about a run that will not get better: each is logged once, with its cause and the key to change."""

import logging

import pytest

from rl_train.metrics.run_warnings import STEPS, WARNINGS, RunWarnings

HEALTHY = {
    "length/truncated_frac": 0.1,
    "length/mean": 100.0,
    "reward/mean": 0.4,
    "reward/std": 0.3,
    "reward/equal_groups_frac": 0.5,
    "rollout/accuracy": 0.4,
    "entropy/sampled": 1.0,
    "kl/reference": 0.05,
    "lr": 1e-5,
    "env/math/answered_frac": 0.9,
}


def steps(count, **changes):
    return [HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()} for _ in range(count)]


CASES = {
    "truncated": steps(STEPS, length__truncated_frac=1.0),
    "no_reward": steps(STEPS, reward__mean=0.0, reward__std=0.0, reward__equal_groups_frac=1.0),
    "equal_rewards": steps(STEPS, reward__equal_groups_frac=1.0),
    "longer_and_longer": steps(STEPS) + steps(STEPS, length__mean=400.0, length__truncated_frac=0.4, reward__mean=0.6),
    "held_out_falls": steps(1, validation__accuracy=0.5)
    + steps(STEPS)
    + steps(1, validation__accuracy=0.35, reward__mean=0.5)
    + steps(STEPS, reward__mean=0.5)
    + steps(1, validation__accuracy=0.3, reward__mean=0.5),
    "entropy": steps(STEPS) + steps(STEPS, entropy__sampled=0.001),
    "far_from_reference": [HEALTHY | {"kl/reference": 1.5 + number} for number in range(STEPS)],
    "unparsed": steps(STEPS, env__math__answered_frac=0.0),
    "no_learning_rate": steps(STEPS, lr=0.0),
}
KEYS = {
    "truncated": "policy.generation.max_new_tokens",
    "no_reward": "rlcore data show",
    "equal_rewards": "num_generations_per_prompt",
    "longer_and_longer": "grpo.reward_shaping",
    "held_out_falls": "checkpointing.keep_top_k",
    "entropy": "policy.generation.temperature",
    "far_from_reference": "loss_fn.reference_policy_kl_penalty",
    "unparsed": "data.prompt",
    "no_learning_rate": "policy.scheduler",
}


@pytest.fixture
def warned(caplog, own_messages):
    """Observes the steps of a run; returns the warnings."""

    def observe(rows, warnings=None):
        watch = warnings or RunWarnings()
        with caplog.at_level(logging.WARNING, logger="rlcore"):
            for step, metrics in enumerate(rows, start=1):
                watch.observe(step, metrics)
        return own_messages()

    return observe


def test_every_warning_has_a_case():
    assert set(CASES) == set(KEYS) == set(WARNINGS)


@pytest.mark.parametrize("name", CASES)
def test_a_condition_is_warned_of_once_with_the_key_to_change(warned, name):
    [warning] = warned(CASES[name] + CASES[name][-1:])
    assert KEYS[name] in warning
    assert warning.startswith(f"step {len(CASES[name])}: ")


@pytest.mark.parametrize("name", CASES)
def test_one_step_less_gives_no_warning(warned, name):
    assert warned(CASES[name][:-1]) == []


def test_a_run_that_learns_gives_no_warning(warned):
    rows = [
        HEALTHY
        | {
            "reward/mean": min(1.0, 0.3 + number / 50),
            "rollout/accuracy": min(1.0, 0.3 + number / 50),
            "reward/equal_groups_frac": min(0.99, 0.5 + number / 50),
            "entropy/sampled": max(0.001, 1.0 - number / 40),
            "length/mean": 100.0 + 10 * number,
            **({"validation/accuracy": min(0.98, 0.3 + number / 60)} if number % 10 == 0 else {}),
        }
        for number in range(60)
    ]
    assert warned(rows) == []


def test_held_out_accuracy_that_is_best_before_the_first_step_is_compared_with_the_rewards_of_the_first_steps(warned):
    rows = [{"validation/accuracy": 0.5}, *CASES["held_out_falls"][1:]]
    [warning] = warned(rows)
    assert "held-out accuracy fell from 0.500 to 0.300" in warning


def test_an_interrupted_condition_starts_again(warned):
    rows = steps(STEPS - 1, length__truncated_frac=1.0) + steps(1) + steps(STEPS - 1, length__truncated_frac=1.0)
    assert warned(rows) == []


def test_values_that_are_not_finite_are_left_out(warned):
    assert warned(steps(2 * STEPS, kl__reference=float("nan"), entropy__sampled=float("inf"))) == []


def test_a_resumed_run_continues_to_count_and_does_not_repeat_a_warning(warned):
    counted = RunWarnings()
    counted.replay([{"step": number, **row} for number, row in enumerate(CASES["truncated"][:-1], start=1)])
    assert len(warned(CASES["truncated"][-1:], counted)) == 1
    repeated = RunWarnings()
    repeated.replay([{"step": number, "loss": None, **row} for number, row in enumerate(CASES["truncated"], start=1)])
    assert len(warned(CASES["truncated"][-1:], repeated)) == 1


@pytest.mark.parametrize(("norms", "warns"), [([0.0, 0.0], True), ([0.0, 0.1], False), ([], False)])
def test_a_run_in_which_no_step_had_a_gradient_warns_at_its_end(caplog, own_messages, norms, warns):
    watch = RunWarnings()
    for step, norm in enumerate(norms, start=1):
        watch.observe(step, {"grad_norm": norm, "reward/mean": 0.0})
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        watch.finish()
    texts = [text.partition(".")[0] for text in own_messages()]
    assert texts == ["nothing was learned: the gradient was 0 in all 2 steps"] * warns


@pytest.mark.parametrize(
    ("fractions", "cause"),
    [
        pytest.param((1.0, 1.0), "All samples of each prompt had equal rewards", id="equal"),
        pytest.param((1.0, 0.5), "The samples of some prompts had different rewards in 1 of them", id="different"),
        pytest.param((None, None), "Check that the loss counts some tokens", id="without rewards"),
    ],
)
def test_the_warning_at_the_end_blames_equal_rewards_only_if_they_were(caplog, own_messages, fractions, cause):
    watch = RunWarnings()
    for step, fraction in enumerate(fractions, start=1):
        watch.observe(step, {"grad_norm": 0.0} | ({} if fraction is None else {"reward/equal_groups_frac": fraction}))
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        watch.finish()
    [text] = own_messages()
    assert text.startswith("nothing was learned: the gradient was 0 in all 2 steps. " + cause)
    assert ("All samples of each prompt" in text) == (fractions == (1.0, 1.0))
