"""Real PPO runs: they learn, resume after a kill, run on several ranks, and reject invalid configs."""

import json
import random
import shutil
import time

import pytest
import torch
from e2e_runs import MODEL, TINY, checkpoint_of, merged, metrics_of, reproducible_metrics_of

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data import BatchedDataDict
from rl_core.errors import ConfigError
from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.algorithms import MseValueLossFn, PPOTrainer
from rl_train.algorithms.policy_configs import GAEConfig
from rl_train.algorithms.ppo import compute_gae_targets, critic_rows
from rl_train.algorithms.sft import train_epochs
from rl_train.launch import train as launch

pytestmark = pytest.mark.slow

LIMITS = {"max_total_sequence_length": 16, "train_global_batch_size": 8}
CRITIC = {"backend": "hf", "model_name": str(MODEL), **LIMITS, "optimizer": {"kwargs": {"lr": 5.0e-4}}}
ALONE = {"cluster": {"backend": "in_process"}}
SMALL = {
    "grpo": None,
    "ppo": {"num_prompts_per_step": 16, "max_num_steps": 6, "seed": 3, "ppo_epochs": 2, "critic_warmup_steps": 1},
    "value": CRITIC,
    **ALONE,
}
"""Two optimizer steps a pass, two passes, and one step for the critic alone: over the tiny run of GRPO."""


def run_here(folder, changes, name="run"):
    """The metrics by step of a whole run in this process."""
    path = folder / f"{name}.yaml"
    log = {"logger": {"log_dir": str(folder / "runs")}, "checkpointing": {"enabled": False}}
    path.write_text(json.dumps(merged(merged(merged(TINY, SMALL), log), changes)))
    launch.train(path, resume="never", console=False)
    return metrics_of(folder, name)


def test_ppo_generalizes_to_unseen_sums(tmp_path):
    steps = run_here(
        tmp_path,
        {
            "ppo": {
                "num_prompts_per_step": 256,
                "max_num_steps": 7,
                "critic_warmup_steps": 2,
                "val_at_start": True,
                "val_at_end": True,
            },
            "policy": {
                "train_global_batch_size": 128,
                "train_micro_batch_size": 128,
                "logprob_batch_size": 256,
                "scheduler": None,
                "optimizer": {"kwargs": {"lr": 2.0e-4}},
            },
            "value": {"train_global_batch_size": 128, "train_micro_batch_size": 128, "logprob_batch_size": 256},
            "data": {
                "train": {"dataset_name": "arithmetic", "num_samples": 4096, "min_digits": 2},
                "validation": {"dataset_name": "arithmetic", "num_samples": 256, "min_digits": 2, "split": "validation"},
            },
        },
    )
    # 0.61 of the held-out sums are right at first; the standard error of 256 answers is 0.03.
    assert steps[7]["validation/accuracy"] > steps[0]["validation/accuracy"] + 0.1
    # A zero head explains no variance; after the warm-up it is better than a constant.
    assert steps[1]["value/explained_variance"] == 0.0
    assert sum(steps[step]["value/explained_variance"] for step in range(3, 8)) > 0.0
    assert steps[7]["loss/value"] < 0.5 * steps[1]["loss/value"]
    # Only the critic is trained during its warm-up: policy metrics start afterwards.
    assert [step for step in sorted(steps) if "loss/policy" in steps[step]] == list(range(3, 8))
    assert steps[3]["num_optimizer_steps"] == steps[1]["value/num_optimizer_steps"] == 4
    assert steps[3]["staleness/mean"] == 0


def test_a_killed_run_resumes_to_the_result_of_an_uninterrupted_run(held, train_here, tmp_path):
    kept = {**SMALL, "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.05}}
    code, output = train_here(kept, folder=tmp_path / "straight")
    assert code == 0, output
    straight = reproducible_metrics_of(tmp_path / "straight")
    assert sorted(straight) == [1, 2, 3, 4, 5, 6]
    # The estimate in the reward (k1) may be negative; it is 0 only while the policy equals its reference.
    assert straight[6]["kl/reference"] != 0
    at, pause = random.choice((2, 4)), random.random()
    killed = held(6, kept)
    killed.wait_for(checkpoint_of(at, tmp_path).is_dir)
    time.sleep(pause)  # somewhere in the middle of a step, of the sixth at the latest
    killed.kill()
    killed.process.wait()
    held.let_go()
    code, output = train_here(merged(kept, held.environment))
    assert code == 0, output
    assert "steps done" in output, "it was resumed"
    assert reproducible_metrics_of(tmp_path) == straight, f"killed {pause:.3f} s after the checkpoint of step {at}"
    assert {path.name for path in checkpoint_of(6, tmp_path).iterdir()} >= {"policy", "value"}


@pytest.mark.full("test_trainers.py has two ranks of Ray; backends_hf/test_scalar_head.py a value model on two ranks")
def test_two_ranks_of_policy_and_critic_over_ray_take_the_steps_of_one(train_here, tmp_path, local_ray):
    here = run_here(tmp_path, {"ppo": {"max_num_steps": 2}})
    two = {"cluster": {"backend": "ray", "workers_per_node": 2}, "checkpointing": {"enabled": False}}
    code, output = train_here({**SMALL, **two, "ppo": {**SMALL["ppo"], "max_num_steps": 2}}, folder=tmp_path / "ray")
    assert code == 0, output
    there = metrics_of(tmp_path / "ray")
    for step in (1, 2):
        assert there[step]["reward/mean"] == here[step]["reward/mean"]
        for name in ("loss/value", "value/mean", "value/return_mean", "advantage/std"):
            # Float32 sums in another order, through four steps of Adam.
            assert there[step][name] == pytest.approx(here[step][name], rel=1e-3, abs=1e-5), name
    assert there[2]["grad_norm"] == pytest.approx(here[2]["grad_norm"], rel=1e-2)


def test_multi_turn_ppo_rollouts_train_only_on_sampled_tokens(tmp_path):
    asked = {"dataset_name": "guess", "num_samples": 64, "lowest": 10, "highest": 99, "question": "{lowest}-{highest}="}
    steps = run_here(
        tmp_path,
        {
            "ppo": {"max_num_steps": 2, "max_rollout_turns": 3, "gae": {"gamma": 0.9, "bootstrap_truncated": True}},
            "policy": {"max_total_sequence_length": 64},
            "value": {"max_total_sequence_length": 64},
            "data": {"train": asked},
            "env": {"arithmetic": None, "guess": {"max_guesses": 3, "higher": "+", "lower": "-", "unreadable": "*"}},
        },
    )
    assert steps[2]["rollout/turns"] > 1
    # Each pass trains the sampled tokens and no other.
    assert steps[2]["tokens/trained"] == pytest.approx(2 * 16 * steps[2]["length/mean"])


FULL = pytest.mark.full("adapters of policy and critic train in CI")


@pytest.mark.parametrize("with_adapters", [pytest.param(("policy",), marks=FULL), ("policy", "value")])
def test_policy_and_critic_may_be_adapters(with_adapters, tmp_path):
    lora = {name: {"hf_cfg": {"lora": {"rank": 4}}} for name in with_adapters}
    steps = run_here(tmp_path, {**lora, "ppo": {"max_num_steps": 3}})
    assert steps[3]["grad_norm"] > 0
    assert steps[3]["mismatch/kl"] < 1e-6
    assert steps[3]["loss/value"] < steps[1]["loss/value"]


PLANS = {
    "three rows at a time": {"train_micro_batch_size": 3, "logprob_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}},
    "under a budget": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
}


def train_critic(**fields):
    """Values of rows of several lengths before and after two epochs over them, and the reported metrics."""
    draw = torch.Generator().manual_seed(5)
    lengths, column = torch.randint(7, 13, (8,), generator=draw), torch.arange(12)
    ids = torch.randint(4, 14, (8, 12), generator=draw)
    rows = BatchedDataDict(input_ids=torch.where(column < lengths.unsqueeze(1), ids, 0), input_lengths=lengths)
    rows["token_mask"] = ((column >= 5) & (column != 7) & (column < lengths.unsqueeze(1))).float()
    rows["sample_mask"] = (torch.arange(8) != 3).float()
    rows["rewards"], rows["truncated"] = torch.rand(8, generator=draw), torch.arange(8) == 2
    critic = HuggingFacePolicy(
        str(MODEL), head="scalar", optimizer=CRITIC["optimizer"], **{**LIMITS, "train_micro_batch_size": 8, **fields}
    )
    rows["prev_values"] = critic.get_values(rows)["values"]
    rows["returns"] = compute_gae_targets(rows, GAEConfig(bootstrap_truncated=True)).returns
    reported = train_epochs(critic, MseValueLossFn(), critic_rows(rows), passes=2, seed=(1, 1))
    after = critic.get_values(rows)["values"]
    critic.shutdown()
    return after, reported


def test_a_critic_learns_the_same_in_every_kind_of_microbatch():
    values, reported = train_critic()
    assert reported["num_optimizer_steps"] == 2
    assert values.abs().max() > 1e-3
    for plan in PLANS.values():
        others, found = train_critic(**plan)
        # Float32 sums in another order, through two steps of Adam.
        assert torch.allclose(others, values, rtol=1e-3, atol=1e-5)
        for name, number in {"grad_norm": reported["grad_norm"], **reported["metrics"]}.items():
            assert {"grad_norm": found["grad_norm"], **found["metrics"]}[name] == pytest.approx(number, rel=1e-3, abs=1e-5), (
                name
            )


def test_ppo_from_python_takes_the_steps_of_the_config(tmp_path):
    section = {**SMALL["ppo"], "max_num_steps": 2}
    optimizer = {"kwargs": {"lr": 1.0e-4}}
    policy = HuggingFacePolicy(str(MODEL), optimizer=optimizer, **LIMITS)
    value = HuggingFacePolicy(str(MODEL), head="scalar", optimizer=CRITIC["optimizer"], **LIMITS)
    generation, environment = HuggingFaceGeneration(str(MODEL), max_new_tokens=5), ArithmeticEnvironment()
    parts = {"generation": generation, "environments": {"arithmetic": environment}}
    try:
        with pytest.raises(ConfigError, match="ppo has a critic: pass `value`"):
            PPOTrainer(policy, config=section, **parts)
        with pytest.raises(ConfigError, match=r"value\.head: must be 'scalar'"):
            PPOTrainer(policy, value=policy, config=section, **parts)
        found = PPOTrainer(policy, value=value, config=section, **parts).train(ArithmeticDataset({"num_samples": 40}))
    finally:
        for part in (policy, value, generation, environment):
            part.shutdown()
    expected = run_here(
        tmp_path, {"ppo": {"max_num_steps": 2}, "policy": {"scheduler": None, "optimizer": {"kwargs": {"weight_decay": 0.0}}}}
    )
    for step in found:
        for name, number in expected[int(step["step"])].items():
            if not name.startswith(("refit/", "tokens_per_s", "memory/")):
                assert step[name] == pytest.approx(number, rel=1e-5, abs=1e-7), name


def other_tokenizer(folder):
    """The model with a tokenizer in which the ids of two digits are swapped."""
    shutil.copytree(MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


WRONG = {
    "no critic": ({"value": None}, "value is required. ppo needs a value model"),
    "a critic that scores tokens": ({"value": {**CRITIC, "head": "tokens"}}, "value.head: must be 'scalar'"),
    "nothing but warm-up": (
        {"ppo": {**SMALL["ppo"], "critic_warmup_steps": 6}},
        "ppo.critic_warmup_steps: the first 6 steps train only the critic and the run has 6",
    ),
    "epochs that end within the warm-up": (
        {"ppo": {**SMALL["ppo"], "critic_warmup_steps": 2, "max_num_epochs": 1}},
        "ppo.critic_warmup_steps: the first 2 steps train only the critic and the run has 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_configs_exit_with_a_reason_and_without_a_traceback(name, train_here):
    changes, says = WRONG[name]
    code, output = train_here({**SMALL, **changes})
    assert code == 2, output
    assert says in " ".join(output.split())
    assert "Traceback" not in output


def test_a_critic_with_another_tokenizer_is_rejected_before_anything_runs(train_here, tmp_path):
    model = other_tokenizer(tmp_path / "other")
    code, output = train_here({**SMALL, "value": {**CRITIC, "model_name": str(model)}})
    assert code == 2, output
    assert "differs from that of the policy" in " ".join(output.split())
    assert "Traceback" not in output
