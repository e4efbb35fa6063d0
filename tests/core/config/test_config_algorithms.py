"""What an algorithm, its loss and the rest of a run cannot be together is said with its file and line."""

import pytest


def test_settings_of_one_section_that_contradict_each_other_are_told_at_their_section(files, good):
    text = "loss_fn: {name: gspo, token_level_loss: true}\n" + good
    [error] = files.errors(text)
    assert error.startswith("config.yaml:1:1: loss_fn: sequence_level_importance_ratios makes a sequence the unit")
    text = good.replace("num_prompts_per_step: 8", "adv_estimator: {name: rlooo}")
    [error] = files.errors(text)
    assert error.startswith("config.yaml:2:3: grpo.adv_estimator: adv_estimator 'rlooo' is unknown")


def test_settings_that_two_sections_cannot_honour_together_are_told_at_the_key_to_blame(files, good):
    gdpo = good.replace("num_prompts_per_step: 8", "adv_estimator: {name: gdpo}")
    [error] = files.errors("loss_fn: {reference_policy_kl_penalty: 0.1, use_kl_in_reward: true}\n" + gdpo)
    assert error.startswith("config.yaml:1:63: loss_fn.use_kl_in_reward: adv_estimator gdpo has several rewards")


@pytest.mark.parametrize(
    ("shaping", "says"),
    [
        ("{enabled: true, overlong_buffer_length: 64}", "64 tokens would punish answers of every length"),
        ("{enabled: true, overlong_buffer_length: 9}\n  max_rollout_turns: 2", "max_response_length must be set"),
    ],
)
def test_a_punishment_for_length_must_fit_the_lengths(files, good, shaping, says):
    [error] = files.errors(good.replace("num_prompts_per_step: 8", f"reward_shaping: {shaping}"))
    assert says in error


def test_a_constant_length_may_be_interpolated(files, good):
    text = "loss_fn: {name: dr_grpo, constant_length_normalizer: '${policy.generation.max_new_tokens}'}\n" + good
    loss = files.load(text).run.loss_fn
    assert (loss.constant_length_normalizer, loss.token_level_loss) == (64, False)


@pytest.mark.parametrize("name", ["clipped_pg", "grpo", "dapo", "gspo", "cispo"])
def test_the_losses_of_the_papers_are_names(files, good, name):
    loaded = files.load(f"loss_fn: {{name: {name}}}\n" + good)
    assert files.load(loaded.to_yaml()).run == loaded.run
