"""Every algorithm learns: whole runs in this process on the quickstart model improve their metric."""

import json
import sys

import pytest
import torch
from e2e_runs import MODEL, merged, metrics_of

from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset, add_without_carrying
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

COMMON = {
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "train_micro_batch_size": 256,
        "logprob_batch_size": 256,
        "optimizer": {"kwargs": {"lr": 2.0e-4}},
    },
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
OFTEN = {"seed": 3, "val_at_start": True, "val_at_end": True}
SUMS = {
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 8, "max_num_steps": 8, **OFTEN},
    "policy": {"generation": {"backend": "hf", "max_new_tokens": 5}},
    "data": {
        "train": {"dataset_name": "arithmetic", "num_samples": 4096, "min_digits": 2},
        "validation": {"dataset_name": "arithmetic", "num_samples": 256, "min_digits": 2, "split": "validation"},
    },
    "env": {"arithmetic": {}},
}


class TwoRewards(ArithmeticEnvironment):
    """Rewards a correct answer, and under another name an answer with the correct number of digits."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, metadata)
        said = [log[-1]["content"].strip() for log in message_log_batch]
        digits = [float(len(text) == len(m["expected_answer"])) for text, m in zip(said, metadata, strict=True)]
        return answer._replace(rewards={"right": answer.rewards, "digits": torch.tensor(digits)})

    def global_post_process_and_metrics(self, batch):
        return batch, {"accuracy": float((batch["rewards"] > 1.5).float().mean())}


def run(folder, changes, name="run"):
    """The metrics by step of a whole run in this process."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(merged(COMMON, {**changes, "logger": {"log_dir": str(folder / "runs")}})))
    train(path, resume="never", console=False)
    return metrics_of(folder, name)


SEVERAL_UPDATES = {"policy": {"train_global_batch_size": 64}}
VARIANTS = {
    "grpo": {},
    "grpo of the paper": {"loss_fn": {"name": "grpo"}},
    "dapo": {
        "loss_fn": {"name": "dapo"},
        "grpo": {
            "use_dynamic_sampling": True,
            "overlong_filtering": True,
            "reward_shaping": {"enabled": True, "overlong_buffer_length": 1, "overlong_buffer_penalty": 0.5},
        },
        **SEVERAL_UPDATES,
    },
    "dr-grpo": {
        "loss_fn": {"name": "dr_grpo", "constant_length_normalizer": 5},
        "grpo": {"adv_estimator": {"normalize_rewards": False}},
    },
    "gspo": {"loss_fn": {"name": "gspo"}, **SEVERAL_UPDATES},
    "cispo": {"loss_fn": {"name": "cispo"}, **SEVERAL_UPDATES},
    "gspo of sequences": {"loss_fn": {"name": "gspo_sequence"}, **SEVERAL_UPDATES},
    "dppo": {"loss_fn": {"name": "dppo"}, **SEVERAL_UPDATES},
    "dppo of prime-rl": {
        "loss_fn": {"name": "dppo", "divergence_max_below": 0.2, "divergence_max_above": 0.2, "log_ratio_penalty": 0.001},
        **SEVERAL_UPDATES,
    },
    "dppo of kl": {"loss_fn": {"name": "dppo", "divergence": "kl", "ratio_to": "policy"}, **SEVERAL_UPDATES},
    "sapo": {"loss_fn": {"name": "sapo"}, **SEVERAL_UPDATES},
    "gmpo": {"loss_fn": {"name": "gmpo"}, **SEVERAL_UPDATES},
    "vespo": {"loss_fn": {"name": "vespo", "ratio_to": "sampler"}, **SEVERAL_UPDATES},
    "luspo": {"loss_fn": {"name": "gspo", "constant_length_normalizer": 1}, **SEVERAL_UPDATES},
    "clip-cov": {"loss_fn": {"name": "clip_cov", "clip_cov_min": 0.1, "clip_cov_fraction": 0.002}, **SEVERAL_UPDATES},
    "kl-cov": {"loss_fn": {"name": "kl_cov"}, **SEVERAL_UPDATES},
    "max-rl": {"grpo": {"adv_estimator": {"name": "max_rl"}}},
    "optimal token baseline": {
        "loss_fn": {"disable_ppo_ratio": True},
        "grpo": {"adv_estimator": {"name": "optimal_token_baseline"}},
    },
    "remax": {
        "loss_fn": {"disable_ppo_ratio": True},
        "grpo": {"num_prompts_per_step": 256, "num_generations_per_prompt": 1, "adv_estimator": {"name": "remax"}},
    },
    "rloo": {"loss_fn": {"disable_ppo_ratio": True}, "grpo": {"adv_estimator": {"name": "rloo"}}},
    "reinforce++": {
        "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": "k1"},
        "grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}},
    },
    "reinforce++ with a baseline": {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": True}}},
    "gdpo": {
        "env": {"arithmetic": {"env_cls": "two_rewards.TwoRewards"}},
        "grpo": {"adv_estimator": {"name": "gdpo", "reward_weights": {"digits": 0.25}}},
    },
    "corrected": {
        "loss_fn": {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        "grpo": {"reward_scaling": {"enabled": True, "target_min": -1.0}, "advantage_clip_low": -2.0},
    },
}


FULL_VARIANTS = pytest.mark.full("tests/train/algorithms proves the formulas; grpo and clip-cov learn in CI")
ALWAYS_VARIANTS = ("grpo", "clip-cov")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS_VARIANTS else FULL_VARIANTS) for name in VARIANTS]
)
def test_training_with_rewards_generalizes_to_unseen_sums(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "two_rewards", sys.modules[__name__])
    steps = run(tmp_path, merged(SUMS, VARIANTS[name]))
    # 0.61 of the held-out sums are right at first, and 0.81 to 0.88 after 8 steps; the standard error of 256 answers is 0.03.
    assert steps[8]["validation/accuracy"] > steps[0]["validation/accuracy"] + 0.1
    assert steps[8]["grad_norm"] > 0


def test_microbatches_do_not_change_which_tokens_clip_cov_selects(tmp_path):
    changes = merged(SUMS, {**VARIANTS["clip-cov"], "grpo": {"max_num_steps": 1, "val_at_start": False, "val_at_end": False}})
    one, other = (
        run(tmp_path, merged(changes, {"policy": {"train_micro_batch_size": rows}}), name=f"of_{rows}")[1] for rows in (64, 16)
    )
    # Sums of microbatches in another order; the first of the four optimizer steps is without clipping.
    for name in ("loss", "grad_norm", "ratio/clipped_frac"):
        assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
    assert one["ratio/clipped_frac"] > 0


def write_pairs(path, split, number):
    """Sums that carry, with the correct answer and the answer without carries."""
    sums = ArithmeticDataset({"num_samples": 4 * number, "min_digits": 2, "split": split})
    rows = []
    for index in range(len(sums)):
        problem = sums.problem(index)
        wrong = add_without_carrying(problem.left, problem.right)
        if wrong != problem.answer:
            rows.append({"prompt": f"{problem.left}+{problem.right}=", "chosen": str(problem.answer), "rejected": str(wrong)})
    assert len(rows) >= number
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:number]))


def preferences(folder, **changes):
    for split, number in (("train", 512), ("validation", 128)):
        if not (folder / f"{split}.jsonl").exists():
            write_pairs(folder / f"{split}.jsonl", split, number)
    base = {
        "dpo": {"max_num_steps": 10, "global_batch_size": 32, **OFTEN},
        "data": {
            "train": {"dataset_name": "preference", "path": str(folder / "train.jsonl")},
            "validation": {"dataset_name": "preference", "path": str(folder / "validation.jsonl")},
        },
    }
    return merged(base, changes)


PREFERENCE_LOSSES = {
    "dpo": {"name": "dpo", "reference_policy_kl_penalty": 0.1},
    "cdpo": {"name": "dpo", "reference_policy_kl_penalty": 0.1, "label_smoothing": 0.1, "sft_loss_weight": 0.1},
    "ipo": {"name": "ipo", "reference_policy_kl_penalty": 0.2},
    "hinge": {"name": "dpo_hinge", "reference_policy_kl_penalty": 0.1},
    "simpo": {"name": "simpo"},
    "orpo": {"name": "orpo", "preference_loss_weight": 1.0},
}


FULL_LOSSES = pytest.mark.full("tests/train/algorithms proves the formulas; dpo learns in CI")
ALWAYS_LOSSES = ("dpo",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS_LOSSES else FULL_LOSSES) for name in PREFERENCE_LOSSES]
)
def test_preference_training_generalizes_to_unseen_pairs(name, tmp_path):
    steps = run(tmp_path, preferences(tmp_path, loss_fn=PREFERENCE_LOSSES[name]))
    # Ties of a policy with its own copy count half; without a reference, the policy prefers its own answers.
    assert steps[0]["validation/accuracy"] <= 0.5
    assert steps[10]["validation/accuracy"] > 0.9


@pytest.mark.full("test_resume_of_algorithms.py resumes a run bit for bit")
def test_the_resumed_preference_example_equals_an_uninterrupted_run(tmp_path):
    example = MODEL.parents[1] / "dpo_addition.yaml"

    def trained(folder, steps, resume):
        changes = [
            f"dpo.max_num_steps={steps}",
            "dpo.val_period=2",
            "checkpointing.save_period=2",
            "cluster.backend=in_process",
        ]
        return train(example, [*changes, f"logger.log_dir={folder / 'runs'}"], resume=resume, console=False)

    trained(tmp_path / "straight", 4, "never")
    trained(tmp_path / "stopped", 2, "never")
    assert trained(tmp_path / "stopped", 4, "auto").resumed_from == 2
    straight, stopped = (metrics_of(tmp_path / name, "dpo_addition") for name in ("straight", "stopped"))
    assert sorted(stopped) == [0, 1, 2, 3, 4]
    # The last bits may differ between two loads of a model.
    assert stopped[4]["loss"] == pytest.approx(straight[4]["loss"], rel=1e-5)
    assert stopped[4]["validation/accuracy"] > 0.9
