"""Conflicts between an algorithm, its loss and the rest of a config are reported with file and line."""

import json
import re
from pathlib import Path

import pytest
import yaml


def test_contradictory_settings_of_one_section_are_reported_at_that_section(files, good):
    text = "loss_fn: {name: gspo, token_level_loss: true}\n" + good
    [error] = files.errors(text)
    assert error.startswith("config.yaml:1:1: loss_fn: sequence_level_importance_ratios clips whole sequences")
    text = good.replace("num_prompts_per_step: 8", "adv_estimator: {name: rlooo}")
    [error] = files.errors(text)
    assert error.startswith("config.yaml:2:19: grpo.adv_estimator.name: unknown estimator 'rlooo': use grpo, rloo")
    assert error.endswith("Did you mean 'rloo'?")
    text = good.replace("model_name: some/model", "model_name: some/model\n  optimizer: {name: adamw}")
    [error] = files.errors(text)
    assert "policy.optimizer.name: 'adamw' is not a dotted path. Write it in full, such as torch.optim.AdamW." in error


def test_contradictory_settings_of_two_sections_are_reported_at_the_key_to_change(files, good):
    gdpo = good.replace("num_prompts_per_step: 8", "adv_estimator: {name: gdpo}")
    [error] = files.errors("loss_fn: {reference_policy_kl_penalty: 0.1, use_kl_in_reward: true}\n" + gdpo)
    assert error.startswith("config.yaml:1:63: loss_fn.use_kl_in_reward: adv_estimator gdpo normalizes several rewards")


def test_max_rl_refuses_a_kl_penalty_in_the_reward_at_its_line(files, good):
    max_rl = good.replace("num_prompts_per_step: 8", "adv_estimator: {name: max_rl}")
    [error] = files.errors("loss_fn: {reference_policy_kl_penalty: 0.1, use_kl_in_reward: true}\n" + max_rl)
    assert error.startswith("config.yaml:1:63: loss_fn.use_kl_in_reward: adv_estimator max_rl divides by the mean reward")


def test_one_sample_per_prompt_needs_a_baseline_that_is_not_another_sample(files, good):
    one = good.replace("num_prompts_per_step: 8", "num_generations_per_prompt: 1")
    [error] = files.errors(one)
    assert "grpo.num_generations_per_prompt: 1 sample per prompt is only supported with adv_estimator remax" in error
    assert "or use that estimator" in error
    files.load(one.replace("prompt: 1", "prompt: 1\n  adv_estimator: {name: remax}"))


@pytest.mark.parametrize("loss", ["dppo", "sapo", "kl_cov"])
def test_algorithms_without_rewards_refuse_every_policy_gradient_loss(files, good, loss):
    pairs = good.replace("grpo:", "dpo:").replace("num_prompts_per_step: 8", "global_batch_size: 8")
    assert any("does not use pairs of answers" in error for error in files.errors(f"loss_fn: {{name: {loss}}}\n" + pairs))


@pytest.mark.parametrize(
    ("shaping", "says"),
    [
        ("{enabled: true, overlong_buffer_length: 64}", "64 tokens would penalize answers of every length"),
        ("{enabled: true, overlong_buffer_length: 9}\n  max_rollout_turns: 2", "max_response_length is required"),
    ],
)
def test_an_overlong_penalty_must_fit_the_length_limits(files, good, shaping, says):
    [error] = files.errors(good.replace("num_prompts_per_step: 8", f"reward_shaping: {shaping}"))
    assert says in error


def test_a_length_penalty_that_gdpo_would_normalize_away_is_an_error(files, good):
    def grpo(penalty, **estimator):
        section = {
            "reward_shaping": {"enabled": True, "overlong_buffer_length": 9, "overlong_buffer_penalty": penalty},
            "adv_estimator": {"name": "gdpo", **estimator},
        }
        return good.replace("num_prompts_per_step: 8", "\n  ".join(f"{key}: {json.dumps(section[key])}" for key in section))

    [error] = files.errors(grpo(0.001))
    assert "overlong_buffer_penalty is 0.001, but adv_estimator gdpo divides each named reward" in error
    assert error.startswith("config.yaml:1:1: grpo: ")
    # The weight has an effect, and so has the size of a penalty that is not normalized.
    assert files.load(grpo(1.0, reward_weights={"overlong": 0.001}))
    assert files.load(grpo(0.001, normalize_rewards=False))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            "use_dynamic_sampling: true\n  max_num_epochs: 2",
            "config.yaml:3:19: grpo.max_num_epochs: dynamic sampling draws as many",
        ),
        ("val_num_generations_per_prompt: 4", "config.yaml:2:35: grpo.val_num_generations_per_prompt: validation is greedy"),
    ],
)
def test_numbers_outside_their_valid_range_are_errors(files, good, keys, says):
    [error] = files.errors(good.replace("num_prompts_per_step: 8", keys))
    assert error.startswith(says)


def test_an_estimator_that_is_wrong_in_the_reward_is_refused_at_its_line(files, good):
    loss = "loss_fn:\n  use_kl_in_reward: true\n  reference_policy_kl_penalty: 0.1\n  reference_policy_kl_type: k3\n"
    [error] = files.errors(loss + good)
    assert error.startswith(
        "config.yaml:4:3: loss_fn.reference_policy_kl_type: k3 in the reward (use_kl_in_reward) has a wrong"
    )
    assert files.load(loss.replace("k3", "k1") + good).run.loss_fn.kl_estimator == "k1"


def test_a_constant_length_may_be_interpolated(files, good):
    text = "loss_fn: {name: dr_grpo, constant_length_normalizer: '${policy.generation.max_new_tokens}'}\n" + good
    loss = files.load(text).run.loss_fn
    assert (loss.constant_length_normalizer, loss.token_level_loss) == (64, False)


@pytest.mark.parametrize("name", ["clipped_pg", "grpo", "dapo", "gspo", "cispo"])
def test_the_losses_of_the_papers_are_names(files, good, name):
    loaded = files.load(f"loss_fn: {{name: {name}}}\n" + good)
    assert files.load(loaded.to_yaml()).run == loaded.run


GRPO_PAGE = (Path(__file__).parents[3] / "docs" / "algorithms" / "grpo.md").read_text()
DPO_PAGE = (Path(__file__).parents[3] / "docs" / "algorithms" / "dpo.md").read_text()
VARIANTS = {
    row.split("|")[1].strip(): re.findall(r"`((?:loss_fn|grpo): \{.*?\})`", row)
    for row in GRPO_PAGE.split("## Variants")[1].split("## Advantages")[0].splitlines()
    if row.startswith("|") and "{" in row
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_variants_on_the_page_are_valid_configs(files, good, name):
    sections = {}
    for text in VARIANTS[name]:
        sections |= yaml.safe_load(text.replace("...", "overlong_buffer_length: 16"))
    assert sections
    config = {**yaml.safe_load(good), **sections}
    run = files.load(yaml.safe_dump(config)).run
    loss = sections.get("loss_fn", {}).get("name")
    assert run.loss_fn.name == (loss or "clipped_pg")


def test_every_loss_over_pairs_on_the_page_is_a_name(files):
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DPO_PAGE, flags=re.DOTALL)[0])
    config["policy"]["model_name"] = "some/model"
    for split in ("train", "validation"):
        files.write('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}', f"{split}.jsonl")
    names = re.findall(r"^\| `(\w+)`, \[", DPO_PAGE, flags=re.MULTILINE)
    assert names == ["dpo", "ipo", "dpo_hinge", "simpo", "orpo"]
    assert files.load(yaml.safe_dump(config)).run.algorithm_name == "dpo"
    for name in names:
        assert files.load(yaml.safe_dump({**config, "loss_fn": {"name": name}})).run.loss_fn.name == name


def test_preference_losses_and_reward_algorithms_cannot_be_mixed(files, good):
    [error] = files.errors("loss_fn: {name: simpo}\n" + good)
    assert error == (
        "config.yaml:1:17: loss_fn.name: simpo needs pairs of answers, but grpo trains on rewards. Use a policy-gradient loss."
    )
    dpo = (
        good[: good.index("env:")]
        .replace("  generation:\n    backend: hf\n    max_new_tokens: 64\n", "")
        .replace("grpo:\n  num_prompts_per_step: 8", "dpo: {}")
        .replace("backend: hf\n  model", "backend: hf\n  train_global_batch_size: 7\n  model")
    )
    first, second, third = files.errors("loss_fn: {name: nll}\n" + dpo)
    assert first.startswith("config.yaml:1:17: loss_fn.name: nll does not use pairs of answers")
    assert second.startswith("config.yaml:5:28: policy.train_global_batch_size: 7 rows would split a pair")
    assert third.startswith("config.yaml:8:25: data.train.dataset_name: arithmetic has prompts or conversations, but dpo needs")
