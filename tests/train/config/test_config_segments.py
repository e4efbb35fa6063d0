"""A config whose rollouts can have several segments needs an algorithm and a loss that support them, and several turns."""

import pytest

TURNS = "arithmetic: {max_rollout_turns: 3}"
HISTORY = "rollout: {history: template}\n"


def test_a_rendered_history_is_accepted_with_several_turns(files, good):
    assert files.load(good.replace("arithmetic: {}", TURNS) + HISTORY).run.rollout.history == "template"


def test_a_rendered_history_of_one_turn_has_no_effect_and_is_refused(files, good):
    [error] = files.errors(good + HISTORY)
    assert "rollout.history: rollouts have one turn" in error


@pytest.mark.parametrize(
    ("loss", "where"),
    [
        ("{name: gspo}", "loss_fn.token_level_loss: rollout.history: template can divide a rollout into several segments"),
        ("{token_level_loss: false}", "loss_fn.token_level_loss: rollout.history: template"),
        (
            "{use_importance_sampling_correction: true, truncated_importance_sampling_type: seq-mask-tis, "
            "truncated_importance_sampling_ratio_min: 0.5}",
            "loss_fn.truncated_importance_sampling_type: rollout.history: template",
        ),
    ],
)
def test_losses_over_sequences_are_refused(files, good, loss, where):
    [error] = files.errors(good.replace("arithmetic: {}", TURNS) + HISTORY + f"loss_fn: {loss}\n")
    assert where in error


def test_ppo_is_refused_because_its_values_follow_one_sequence(files, good):
    text = good.replace("grpo:\n", "ppo:\n").replace("arithmetic: {}", TURNS) + HISTORY
    text += "value: {backend: hf, model_name: some/model}\n"
    [error] = files.errors(text)
    assert "rollout.history: rollout.history: template can divide a rollout into several segments, which ppo does not" in error
