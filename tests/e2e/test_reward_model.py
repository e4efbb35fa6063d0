"""Reward models: the example learns with every kind of microbatch; scores agree with GRPO and an outside computation."""

import json

import pytest
import torch
import transformers
from e2e_runs import MODEL, PLANS_OF_PAIRS, merged, metrics_of, without_speed

from rl_backends_hf import HuggingFacePolicy
from rl_core.data import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError
from rl_envs import RewardModelEnvironment
from rl_train.algorithms import BradleyTerryLossFn, DPOTrainer, RewardModelTrainer
from rl_train.data.messages import batched_message_log_to_flat_message, get_formatted_message_log
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

EXAMPLE = MODEL.parents[1] / "rm_addition.yaml"
LIMITS = {"max_total_sequence_length": 16, "train_micro_batch_size": 16, "logprob_batch_size": 8, "head": "scalar"}
OPTIMIZER = {"kwargs": {"lr": 1.0e-3}}
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 10), "margin": (a + b) % 3 / 4}
    for a in range(15, 19)
    for b in range(15, 19)
]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The folder of a run of the example in this process."""
    folder = tmp_path_factory.mktemp("rm")
    train(EXAMPLE, ["cluster.backend=in_process", f"logger.log_dir={folder / 'runs'}"], resume="never", console=False)
    return folder


@pytest.fixture(scope="module")
def judge(example):
    """The reward model folder in the last checkpoint of the example."""
    return str(example / "runs" / "rm_addition" / "checkpoints" / "step_000040" / "policy" / "weights")


def policy(**fields):
    return HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **{**LIMITS, **fields})


def rows_of(talks):
    tokenizer = load_tokenizer(str(MODEL))
    logs = [get_formatted_message_log(talk, tokenizer) for talk in talks]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": tokenizer.pad_token_id})
    return BatchedDataDict(input_ids=flat["token_ids"], input_lengths=lengths)


def last_scores(folder, talks):
    """The policy's values at the last token of each conversation."""
    model = HuggingFacePolicy(folder, **LIMITS)
    rows = rows_of(talks)
    values = model.get_values(rows)["values"]
    model.shutdown()
    return values[torch.arange(len(talks)), rows["input_lengths"] - 1]


def test_the_example_learns_which_of_two_unseen_sums_is_right(example):
    steps = metrics_of(example, "rm_addition")
    assert steps[0]["validation/accuracy"] == 0.5
    assert steps[0]["validation/loss"] == pytest.approx(0.6931, abs=1e-4)
    # 0.83 to 0.88 over three seeds; the standard error of 128 pairs is 0.04.
    assert steps[40]["validation/accuracy"] > 0.75
    assert steps[40]["validation/margin"] > 0.5
    assert steps[40]["validation/score_chosen"] - steps[40]["validation/score_rejected"] == pytest.approx(
        steps[40]["validation/margin"], abs=1e-4
    )
    assert steps[40]["tokens/trained"] == 128


def test_a_checkpoint_is_a_classifier_that_transformers_loads_with_the_same_scores(judge):
    talks = [[{"role": "user", "content": "38+72="}, {"role": "assistant", "content": said}] for said in ("110", "100", "7")]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge)
    rows = rows_of(talks)
    with torch.no_grad():
        pooled = [
            float(model(ids[None, :length]).logits[0, 0])
            for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)
        ]
    assert last_scores(judge, talks).tolist() == pytest.approx(pooled, abs=1e-5)
    assert max(pooled) - min(pooled) > 0.5


@pytest.mark.full("test_resume_of_algorithms.py resumes a run bit for bit")
def test_the_resumed_example_equals_an_uninterrupted_run(tmp_path):
    def trained(folder, steps, resume):
        changes = [f"rm.max_num_steps={steps}", "rm.val_period=2", "checkpointing.save_period=2", "cluster.backend=in_process"]
        return train(EXAMPLE, [*changes, f"logger.log_dir={folder / 'runs'}"], resume=resume, console=False)

    trained(tmp_path / "straight", 4, "never")
    trained(tmp_path / "stopped", 2, "never")
    assert trained(tmp_path / "stopped", 4, "auto").resumed_from == 2
    straight, stopped = (metrics_of(tmp_path / name, "rm_addition") for name in ("straight", "stopped"))
    assert sorted(stopped) == [0, 1, 2, 3, 4]
    # The last bits may differ between two loads of a model.
    assert stopped[4]["loss"] == pytest.approx(straight[4]["loss"], rel=1e-5)
    assert stopped[4]["grad_norm"] == pytest.approx(straight[4]["grad_norm"], rel=1e-4)


def test_a_reward_model_from_python_takes_the_steps_of_the_config(tmp_path):
    section = {"max_num_steps": 3, "global_batch_size": 4, "val_at_start": True, "val_period": 3}
    model = policy()
    trainer = RewardModelTrainer(model, config=section, loss_fn={"centring_weight": 0.01})
    found = trainer.train(PAIRS, validation=PAIRS[:5])
    model.shutdown()
    for name, rows in (("train", PAIRS), ("validation", PAIRS[:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "rm": section,
        "loss_fn": {"centring_weight": 0.01},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "optimizer": OPTIMIZER,
            **{key: value for key, value in LIMITS.items() if key != "head"},
        },
        "data": {
            name: {"dataset_name": "preference", "path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "validation")
        },
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", resume="never", console=False)
    steps = metrics_of(tmp_path)
    assert without_speed(found) == without_speed([steps[step] for step in sorted(steps)])


@pytest.mark.parametrize("plan", PLANS_OF_PAIRS)
def test_pairs_take_the_same_steps_in_every_kind_of_microbatch(plan):
    def steps(**fields):
        model = policy(**fields)
        uneven = [{**pair, "rejected": pair["rejected"] * (1 + n % 3)} for n, pair in enumerate(PAIRS)]
        loss_fn = BradleyTerryLossFn()
        found = RewardModelTrainer(model, config={"max_num_steps": 3, "global_batch_size": 8}, loss_fn=loss_fn).train(uneven)
        model.shutdown()
        return found

    for one, other in zip(steps(), steps(**PLANS_OF_PAIRS[plan]), strict=True):
        # Float32 sums in another order: six digits in the loss, fewer in a norm after three steps of Adam.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert other["preference/margin"] == pytest.approx(one["preference/margin"], rel=1e-3, abs=1e-5)


@pytest.mark.full("test_trainers.py trains over two ranks of a cluster as over one, with pairs that do not divide evenly")
def test_two_ranks_of_a_cluster_take_the_steps_of_one(local_ray):
    from rl_core.cluster import RayVirtualCluster

    section = {"max_num_steps": 2, "global_batch_size": 3}
    alone = policy()
    expected = RewardModelTrainer(alone, config=section).train(PAIRS)
    alone.shutdown()
    model = policy()
    with RayVirtualCluster([2]) as cluster:
        # Three pairs on two ranks: a pair of padding rows fills up the batch and has no weight.
        found = RewardModelTrainer(model, cluster, config=section).train(PAIRS)
        model.shutdown()
    for one, two in zip(expected, found, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_grpo_follows_the_reward_model_and_its_rewards_are_the_models_own_values(judge, tmp_path):
    often = {"val_at_start": True, "val_at_end": True}
    config = {
        "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 8, "max_num_steps": 10, "seed": 3, **often},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "train_micro_batch_size": 256,
            "logprob_batch_size": 256,
            "optimizer": {"kwargs": {"lr": 3.0e-4}},
            "generation": {"backend": "hf", "max_new_tokens": 5},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 1024, "min_digits": 2},
            "validation": {"dataset_name": "arithmetic", "num_samples": 256, "min_digits": 2, "split": "validation"},
        },
        "env": {"reward_model": {"model_name": judge, "shift": -0.5, "scale": 2.0}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", resume="never", console=False)
    steps = metrics_of(tmp_path)
    assert steps[10]["validation/reward"] > steps[0]["validation/reward"] + 0.5
    last = steps[10]
    assert last["reward/mean"] == pytest.approx(2.0 * (last["env/reward_model/score_mean"] + 0.5), abs=1e-4)
    assert last["env/reward_model/cut_frac"] == 0.0
    logged = [
        json.loads(line) for line in (tmp_path / "runs" / "run" / "rollouts" / "step_000010.jsonl").read_text().splitlines()
    ]
    scores = torch.tensor([row["reward"] / 2.0 - 0.5 for row in logged])
    torch.testing.assert_close(scores, last_scores(judge, [row["messages"] for row in logged]), rtol=0, atol=1e-5)


def test_the_environment_scores_as_the_policy_side_does(judge):
    talks = [
        [{"role": "user", "content": f"{a}+{a + 7}="}, {"role": "assistant", "content": said}]
        for a in range(11, 31)
        for said in (str(2 * a + 7), str(2 * a - 3), "", "00000")
    ]
    environment = RewardModelEnvironment({"model_name": judge, "batch_size": 7})
    rewards = environment.step(talks, [None] * len(talks)).rewards
    # In another batch, sums have another order: float32 at scores of up to ten.
    torch.testing.assert_close(rewards, last_scores(judge, talks), rtol=0, atol=1e-5)
    assert rewards.std() > 0.3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_fn": {"name": "dpo"}}, "needs log-probabilities of tokens"),
        ({"policy": {"head": "tokens"}}, "head is 'tokens', but rm trains"),
        ({"policy": {"generation": {"backend": "hf", "max_new_tokens": 5}}}, "reward model training does not sample"),
        ({"policy": {"train_global_batch_size": 5}}, "would split a pair"),
        ({"dpo": {}, "rm": None, "loss_fn": {"name": "bradley_terry"}}, "is a loss for value models"),
    ],
)
def test_invalid_configs_are_reported_before_anything_runs(tmp_path, changes, says):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    config = {
        "rm": {},
        "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
        "data": {"train": {"dataset_name": "preference", "path": str(pairs)}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(merged(config, changes)))
    with pytest.raises(ConfigError, match=says):
        train(tmp_path / "run.yaml", resume="never", console=False)


def test_models_of_the_wrong_head_are_refused_by_the_trainers():
    tokens, scalar = policy(head="tokens"), policy()
    with pytest.raises(ConfigError, match="head is 'tokens', but rm trains"):
        RewardModelTrainer(tokens)
    with pytest.raises(ConfigError, match="head is 'scalar', but dpo trains"):
        DPOTrainer(scalar)
    tokens.shutdown()
    scalar.shutdown()
