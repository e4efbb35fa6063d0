"""Errors in PPO configs have file and line."""

import re
from pathlib import Path

import pytest
import yaml

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms" / "ppo.md").read_text()
PPO = """\
ppo:
  num_prompts_per_step: 8
policy:
  backend: hf
  model_name: some/model
  generation:
    backend: hf
    max_new_tokens: 64
value:
  backend: hf
  model_name: some/critic
data:
  train: {dataset_name: arithmetic}
env:
  arithmetic: {}
"""
PROMPTS = "num_prompts_per_step: 8"


def test_a_critic_needs_no_more_than_a_model(files):
    run = files.load(PPO).run
    assert (run.algorithm_name, run.policy.head, run.value.head) == ("ppo", "tokens", "scalar")
    assert (run.loss_fn.name, run.algorithm.value_loss.cliprange_value) == ("clipped_pg", 0.2)
    loaded = files.load(
        PPO.replace(PROMPTS, "gae: {gamma: 0.99, lam: 0.9, value_lam: 1.0}\n  value_loss: {cliprange_value: null}")
    )
    assert files.load(loaded.to_yaml()).run == loaded.run
    assert loaded.run.algorithm.value_loss.cliprange_value is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "value:\n  backend: hf\n  model_name: some/critic\n",
            "",
            "value is required. ppo needs a value model. Set its `backend` and `model_name`",
        ),
        ("some/critic", "some/critic\n  head: tokens", "config.yaml:12:9: value.head: must be 'scalar'"),
        (
            PROMPTS,
            "max_num_steps: 10\n  critic_warmup_steps: 10",
            "config.yaml:3:24: ppo.critic_warmup_steps: the first 10 steps train only the critic and the run has 10",
        ),
        (PROMPTS, "gae: {lam: 1.5}", "ppo.gae.lam"),
        (PROMPTS, "gae: {lam: 0.9, length_adaptive_alpha: 0.05}", "lam and length_adaptive_alpha both set the lambda"),
        (PROMPTS, "value_loss: {name: nll}", "value_loss.name is 'nll', but the loss of the critic is always mse_value"),
        (PROMPTS, "use_dynamic_sampling: true", "ppo has no key 'use_dynamic_sampling'"),
        (PROMPTS, "ppo_epochs: 0", "ppo.ppo_epochs"),
        (PROMPTS, "val_num_generations_per_prompt: 4", "ppo.val_num_generations_per_prompt: validation is greedy"),
        ("ppo:", "loss_fn: {disable_ppo_ratio: true}\nppo:", "config.yaml:1:30: loss_fn.disable_ppo_ratio: without a ratio"),
        (
            "ppo:",
            "loss_fn: {name: mse_value}\nppo:",
            "mse_value is a loss for value models, but ppo trains the log-probabilities of a policy",
        ),
        (
            "ppo:",
            "loss_fn: {name: nll}\nppo:",
            "nll raises the probability of every sample regardless of its reward, so ppo would not learn",
        ),
        ("ppo:", "loss_fn: {name: dpo}\nppo:", "dpo needs pairs of answers, but ppo trains on rewards"),
    ],
)
def test_settings_that_exclude_each_other_are_reported_with_their_line(files, old, new, says):
    assert old in PPO
    assert says in "\n".join(files.errors(PPO.replace(old, new, 1)))


def test_without_a_ratio_one_optimizer_step_is_fine(files):
    text = "loss_fn: {disable_ppo_ratio: true}\n" + PPO.replace(PROMPTS, "ppo_epochs: 1")
    assert files.load(text).run.loss_fn.disable_ppo_ratio
    several = text.replace("  generation:", "  train_global_batch_size: 4\n  generation:")
    assert "loss_fn.disable_ppo_ratio" in files.errors(several)[0]


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_value_loss_cannot_train_a_policy(files, good, algorithm):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", f"{algorithm}: {{}}")
    assert any("mse_value is a loss for value models" in error for error in files.errors("loss_fn: {name: mse_value}\n" + text))


def test_the_config_and_the_penalty_on_the_page_are_valid(files):
    [block] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    config = yaml.safe_load(block)
    for section in ("policy", "value"):
        config[section]["model_name"] = "some/model"
    [penalty] = re.findall(r"`(loss_fn: \{.*?\})`", PAGE)
    run = files.load(yaml.safe_dump({**config, **yaml.safe_load(penalty)})).run
    assert (run.algorithm.gae.lam, run.loss_fn.use_kl_in_reward, run.value.head) == (0.95, True, "scalar")


def test_every_key_on_the_page_exists(files):
    loaded = files.load(PPO)
    keys = re.findall(r"^\| `([\w.]+)` \|", PAGE.split("## Settings")[1].split("##")[0], flags=re.MULTILINE)
    assert len(keys) == 6
    for key in keys:
        section = loaded.run.algorithm
        for part in key.split("."):
            section = getattr(section, part)
