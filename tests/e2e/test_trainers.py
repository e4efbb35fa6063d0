"""The Python pages: documented calls train and use the same code path as a config."""

import asyncio
import json

import pytest
import torch
from e2e_runs import MODEL, PLANS_OF_PAIRS, merged, metrics_of, without_speed

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import Control
from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.algorithms import ClippedPGLossFn, DPOLossFn, DPOTrainer, GRPOTrainer, NLLLossFn, SFTTrainer
from rl_train.algorithms.losses.config import CISPOLossConfig, ClippedPGLossConfig, DrGRPOLossConfig, GSPOLossConfig
from rl_train.algorithms.losses.preference_configs import DPOLossConfig
from rl_train.control import EarlyStopping
from rl_train.errors import PluginHookError
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

LIMITS = {"max_total_sequence_length": 16, "train_micro_batch_size": 8, "logprob_batch_size": 8}
OPTIMIZER = {"kwargs": {"lr": 1.0e-4}}
SECTIONS = {
    "policy": {"backend": "hf", "model_name": str(MODEL), **LIMITS, "optimizer": OPTIMIZER},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 10)} for a in range(15, 19) for b in range(15, 19)
]


@pytest.fixture
def policy():
    policy = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **LIMITS)
    yield policy
    policy.shutdown()


def by_config(folder, config):
    """The result of `rlcore train` for the same run."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(merged(SECTIONS, {**config, "logger": {"log_dir": str(folder / "runs")}})))
    train(path, resume="never", console=False)
    steps = metrics_of(folder)
    return without_speed([steps[step] for step in sorted(steps)])


def test_dpo_from_python_takes_the_steps_of_the_config(policy, tmp_path):
    section = {"max_num_steps": 3, "global_batch_size": 4, "val_at_start": True, "val_period": 3}
    trainer = DPOTrainer(policy, config=section, loss_fn={"reference_policy_kl_penalty": 0.2}, folder=tmp_path / "python")
    found = trainer.train(PAIRS, validation=PAIRS[:5])
    for name, rows in (("train", PAIRS), ("validation", PAIRS[:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {name: {"dataset_name": "preference", "path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "validation")}
    loss = {"reference_policy_kl_penalty": 0.2}
    assert without_speed(found) == by_config(tmp_path, {"dpo": section, "loss_fn": loss, "data": data})
    assert [step["step"] for step in found] == [0, 1, 2, 3]
    assert found[-1]["validation/accuracy"] > found[0]["validation/accuracy"] == 0.5
    assert len((tmp_path / "python" / "metrics.jsonl").read_text().splitlines()) == 4
    assert policy.weight_version == 3


def test_callbacks_control_a_trainer_which_leaves_policy_and_loss_as_they_were(policy):
    """A callback may be an object or a function; the second training starts with the settings of the config again."""
    loss = DPOLossFn(DPOLossConfig(reference_policy_kl_penalty=0.2))

    def change(step):
        return Control(lr_factor=0.25, kl_weight=0.4) if step == 1 else Control(stop="enough") if step == 3 else None

    section = {"max_num_steps": 5, "global_batch_size": 4}
    for _ in range(2):
        stopping = EarlyStopping(metric_name="num_optimizer_steps", mode="max", patience=3)
        found = DPOTrainer(policy, config=section, loss_fn=loss, callbacks=[change, stopping]).train(PAIRS)
        assert [(row["step"], row["lr"], row.get("kl/penalty_weight")) for row in found] == [
            (1, 1e-4, None),
            (2, 0.25e-4, 0.4),
            (3, 0.25e-4, 0.4),
        ]
    assert loss.config == DPOLossConfig(reference_policy_kl_penalty=0.2)
    assert DPOTrainer(policy, config={**section, "max_num_steps": 1}).train(PAIRS)[0]["lr"] == 1e-4
    with pytest.raises(PluginHookError, match=r"the callback 'callbacks\[0\]' \(.*\) raised ZeroDivisionError"):
        DPOTrainer(policy, config=section, callbacks=[lambda step: 1 / 0]).train(PAIRS)


def test_sft_from_python_takes_the_steps_of_the_config(policy, tmp_path):
    section = {"max_num_steps": 2, "global_batch_size": 8}
    found = SFTTrainer(policy, config=section, loss_fn=NLLLossFn()).train(
        ArithmeticDataset({"num_samples": 64, "with_response": True})
    )
    data = {"train": {"dataset_name": "arithmetic", "num_samples": 64, "with_response": True}}
    assert without_speed(found) == by_config(tmp_path, {"sft": section, "data": data})
    assert found[1]["loss"] > 0


def test_grpo_from_python_takes_the_steps_of_the_config(policy, tmp_path):
    section = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2}
    generation = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)
    environment = ArithmeticEnvironment()
    try:
        trainer = GRPOTrainer(policy, config=section, generation=generation, environments={"arithmetic": environment})
        found = trainer.train(ArithmeticDataset({"num_samples": 64, "min_digits": 2}))
    finally:
        generation.shutdown()
        environment.shutdown()
    expected = by_config(
        tmp_path,
        {
            "grpo": section,
            "policy": {"generation": {"backend": "hf", "max_new_tokens": 5}},
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 64, "min_digits": 2}},
            "env": {"arithmetic": {}},
        },
    )
    assert without_speed(found) == expected
    assert found[0]["reward/mean"] > 0


def test_a_policy_made_without_a_cluster_trains_over_the_one_that_the_trainer_is_given(policy, local_ray):
    from rl_core.cluster import RayVirtualCluster

    alone = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **LIMITS)
    section = {"max_num_steps": 2, "global_batch_size": 3}
    expected = DPOTrainer(alone, config=section).train(PAIRS)
    alone.shutdown()
    with RayVirtualCluster([2]) as cluster:
        trainer = DPOTrainer(policy, cluster, config=section)
        assert policy.data_ranks == 2
        # Three pairs on two ranks: a pair of padding rows fills up the batch and has no weight.
        found = trainer.train(PAIRS)
        policy.shutdown()
    for one, two in zip(expected, found, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["preference/margin"] == pytest.approx(one["preference/margin"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("plan", PLANS_OF_PAIRS)
def test_pairs_take_the_same_steps_in_every_kind_of_microbatch(plan):
    def steps(**fields):
        policy = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **{**LIMITS, "train_micro_batch_size": 16, **fields})
        loss_fn = DPOLossFn(DPOLossConfig(sft_loss_weight=0.1))
        uneven = [{**pair, "rejected": pair["rejected"] * (1 + n % 3)} for n, pair in enumerate(PAIRS)]
        found = DPOTrainer(policy, config={"max_num_steps": 3, "global_batch_size": 8}, loss_fn=loss_fn).train(uneven)
        policy.shutdown()
        return found

    for one, other in zip(steps(), steps(**PLANS_OF_PAIRS[plan]), strict=True):
        # Float32 sums in another order: six digits in the loss, fewer in a norm after three steps of Adam.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert other["preference/margin"] == pytest.approx(one["preference/margin"], rel=1e-3, abs=1e-5)


POLICY_GRADIENTS = {
    "gspo": GSPOLossConfig(ratio_clip_min=0.05, ratio_clip_max=0.05),
    "cispo": CISPOLossConfig(ratio_clip_max=0.1),
    "dr-grpo": DrGRPOLossConfig(constant_length_normalizer=5),
    "masked sequences": ClippedPGLossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.05,
        truncated_importance_sampling_ratio_min=0.95,
    ),
}


def sampled_rows(policy):
    """Rows of several lengths with artificial advantages and slightly different sampler and old-policy log-probabilities."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(7, 13, (8,), generator=draw)
    column = torch.arange(12)
    ids = torch.randint(4, 14, (8, 12), generator=draw)
    rows = BatchedDataDict(input_ids=torch.where(column < lengths.unsqueeze(1), ids, 0), input_lengths=lengths)
    rows["token_mask"] = ((column >= 5) & (column < lengths.unsqueeze(1))).float()
    rows["sample_mask"] = (torch.arange(8) != 3).float()
    rows["advantages"] = torch.randn(8, 1, generator=draw) * rows["token_mask"]
    now = policy.get_logprobs(rows)["logprobs"]
    for key in ("prev_logprobs", "generation_logprobs"):
        rows[key] = now + 0.1 * torch.randn(now.shape, generator=draw) * rows["token_mask"]
    return rows


@pytest.mark.parametrize("loss", POLICY_GRADIENTS)
def test_policy_gradients_are_the_same_in_every_kind_of_microbatch(loss):
    found = []
    for fields in (
        {"train_micro_batch_size": 8},
        {"train_micro_batch_size": 3},
        PLANS_OF_PAIRS["packed"],
        PLANS_OF_PAIRS["under a budget"],
    ):
        policy = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **{**LIMITS, **fields})
        found.append(policy.train(sampled_rows(policy), ClippedPGLossFn(POLICY_GRADIENTS[loss])))
        policy.shutdown()
    for other in found[1:]:
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-4, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)
        for name, value in found[0]["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_incompatible_components_are_rejected_before_anything_runs(policy):
    with pytest.raises(ConfigError, match=r"dpo\.global_batch_size: .*found 0"):
        DPOTrainer(policy, config={"global_batch_size": 0})
    with pytest.raises(ConfigError, match="does not use pairs"):
        DPOTrainer(policy, loss_fn={"name": "nll"})
    with pytest.raises(ConfigError, match="pass `generation`, and `reward_fns` or `environments`, to GRPOTrainer"):
        GRPOTrainer(policy)
    with pytest.raises(ConfigError, match="pass `folder` to the trainer"):
        DPOTrainer(policy, checkpointing={"enabled": True})
    with pytest.raises(ConfigError, match="pass data as `validation=`"):
        DPOTrainer(policy, config={"val_at_end": True}).train(PAIRS)
    with pytest.raises(DataError, match="expected `messages`"):
        SFTTrainer(policy).train(PAIRS)
    with pytest.raises(DataError, match="'rejected' is missing"):
        DPOTrainer(policy).train([{"prompt": "a", "chosen": "b"}])
    with pytest.raises(DataError, match="16 records, but a step uses 32"):
        DPOTrainer(policy, config={"global_batch_size": 32}).train(PAIRS)


def test_a_batch_that_cuts_a_pair_is_refused(policy):
    rows = {"input_ids": torch.ones(3, 2, dtype=torch.int64), "input_lengths": torch.tensor([2] * 3)}
    data = BatchedDataDict(
        {**rows, "token_mask": torch.ones(3, 2), "sample_mask": torch.ones(3), "reference_policy_logprobs": torch.zeros(3, 2)}
    )
    with pytest.raises(DataError, match="DPOLossFn reads 2 rows together, but the batch has 3 rows"):
        policy.train(data, DPOLossFn())


def test_grpo_learns_from_a_function_as_it_does_from_the_environment(policy):
    section = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2}
    generation = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)
    asked = []

    def right(completions, expected_answer, **columns):
        asked.append(len(completions))
        return [float(text.strip() == answer) for text, answer in zip(completions, map(str, expected_answer), strict=True)]

    data = ArithmeticDataset({"num_samples": 64, "min_digits": 2})
    other = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, **LIMITS)
    try:
        found = GRPOTrainer(policy, config=section, generation=generation, reward_fns=right).train(data)
        expected = GRPOTrainer(other, config=section, generation=generation, environments=ArithmeticEnvironment()).train(data)
    finally:
        generation.shutdown()
        other.shutdown()
    assert [(step["reward/mean"], step["loss"], step["grad_norm"]) for step in found] == [
        (step["reward/mean"], step["loss"], step["grad_norm"]) for step in expected
    ]
    assert asked == [2, 16, 16]  # the trial before the first step, then one call per step
    with pytest.raises(ConfigError, match="has the name 'wrong', but the rewards are right"):
        GRPOTrainer(policy, config=section, generation=generation, reward_fns=[right], reward_weights={"wrong": 2.0}).train(
            data
        )
    with pytest.raises(ConfigError, match="pass one of them"):
        GRPOTrainer(policy, generation=generation, reward_fns=right, environments=ArithmeticEnvironment())
    with pytest.raises(ConfigError, match="dpo does not use rewards"):
        DPOTrainer(policy, reward_fns=right)


def test_in_a_notebook_reward_functions_may_start_event_loops(policy):
    section = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 1}
    generation = HuggingFaceGeneration(str(MODEL), max_new_tokens=5)

    def trl_style(completions, **columns):
        return [asyncio.run(asyncio.sleep(0, float(len(text)))) for text in completions]

    async def waits_for_a_server(completion):
        return await asyncio.sleep(0, float(len(completion)))

    async def notebook_cell():
        trainer = GRPOTrainer(policy, config=section, generation=generation, reward_fns=[trl_style, waits_for_a_server])
        return trainer.train(ArithmeticDataset({"num_samples": 8}))

    try:
        [step] = asyncio.run(notebook_cell())
    finally:
        generation.shutdown()
    assert step["reward/trl_style"] == step["reward/waits_for_a_server"] > 0
