"""Two ranks started by Ray: losses, algorithms, samples, weights and checkpoints equal those of the Transformers backend.

One policy serves all tests, and goes back to the checkpoint of before its first step in between: ranks take long to start.
"""

import os
import signal
import sys
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
import transformers
from ray import cloudpickle

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WorkerDiedError
from rl_core.interfaces.policy import LossFunction
from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset, add_without_carrying
from rl_train.algorithms import (
    DistillationTrainer,
    DPOTrainer,
    GRPOLossFn,
    GRPOTrainer,
    NLLLossFn,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
)
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.state import Checkpoints
from rl_train.checkpoints.store import CheckpointStore
from rl_train.run_folders.convert import convert

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
FIELDS = {
    "max_total_sequence_length": 16,
    "train_global_batch_size": 64,
    "train_micro_batch_size": 64,
    "logprob_batch_size": 64,
    "optimizer": {"kwargs": {"lr": 2.0e-4}},
}
WATCHED = {"val_at_start": True, "val_at_end": True, "val_batch_size": 128}
CLOCKS = ("time/", "memory/", "refit/", "tokens_per_s", "mismatch/", "staleness", "step")


@pytest.fixture(scope="module")
def cluster(local_ray):
    """Two bundles, each of which can run a rank of the policy, the critic and the teacher."""
    from rl_core.cluster import RayVirtualCluster

    made = RayVirtualCluster([2], max_colocated_worker_groups=3)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def two_ranks(cluster, tmp_path_factory):
    """A policy on two ranks, and a function that resets it."""
    from rl_backends_megatron import MegatronPolicy

    divided = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    policy = MegatronPolicy(str(MODEL), cluster=cluster, **divided, **FIELDS)
    folder = tmp_path_factory.mktemp("before")
    policy.save_checkpoint(folder / "weights", folder / "optimizer")

    def again():
        policy.load_checkpoint(folder / "weights", folder / "optimizer")
        return policy

    yield again
    policy.shutdown()


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory):
    """A folder with the same model after eight batches of correct sums."""
    folder = tmp_path_factory.mktemp("trained_model")
    policy = HuggingFacePolicy(str(MODEL), **{**FIELDS, "optimizer": {"kwargs": {"lr": 1.0e-3}}})
    sft(policy, max_num_steps=8)
    policy.save_checkpoint(folder)
    policy.shutdown()
    return folder


@pytest.fixture(scope="module")
def two_ranks_of_a_critic(cluster, tmp_path_factory):
    """A model with a scalar head on two pipeline stages, and a function that resets it."""
    from rl_backends_megatron import MegatronPolicy

    divided = {"pipeline_model_parallel_size": 2}
    critic = MegatronPolicy(str(MODEL), cluster=cluster, name="value", head="scalar", **divided, **FIELDS)
    folder = tmp_path_factory.mktemp("critic")
    critic.save_checkpoint(folder / "weights", folder / "optimizer")

    def again():
        critic.load_checkpoint(folder / "weights", folder / "optimizer")
        return critic

    yield again
    critic.shutdown()


@pytest.fixture
def one_rank():
    policy = HuggingFacePolicy(str(MODEL), **FIELDS)
    yield policy
    policy.shutdown()


def sums(split, number):
    return ArithmeticDataset({"num_samples": number, "min_digits": 2, "split": split})


def answered(split, number):
    return ArithmeticDataset({"num_samples": number, "min_digits": 2, "split": split, "with_response": True})


def pairs(split, number):
    """Sums that carry, with the correct answer and the answer without carries."""
    found, data = [], sums(split, 4 * number)
    for problem in map(data.problem, range(len(data))):
        wrong = add_without_carrying(problem.left, problem.right)
        if wrong != problem.answer:
            prompt = f"{problem.left}+{problem.right}="
            found.append({"prompt": prompt, "chosen": str(problem.answer), "rejected": str(wrong)})
    return found[:number]


def grpo(policy, loss=None, **section):
    generation, environment = HuggingFaceGeneration(str(MODEL), max_new_tokens=5), ArithmeticEnvironment()
    shape = {"num_prompts_per_step": 16, "num_generations_per_prompt": 8, "max_num_steps": 2, "seed": 3, **section}
    try:
        trainer = GRPOTrainer(
            policy, config=shape, loss_fn=loss, generation=generation, environments={"arithmetic": environment}
        )
        return trainer.train(sums("train", 2048), sums("validation", 128) if "val_at_end" in section else None)
    finally:
        generation.shutdown()
        environment.shutdown()


def ppo(policy, critic):
    generation, environment = HuggingFaceGeneration(str(MODEL), max_new_tokens=5), ArithmeticEnvironment()
    shape = {"num_prompts_per_step": 64, "max_num_steps": 2, "seed": 3}
    parts = {"generation": generation, "environments": {"arithmetic": environment}}
    try:
        return PPOTrainer(policy, value=critic, config=shape, **parts).train(sums("train", 2048))
    finally:
        generation.shutdown()
        environment.shutdown()


def reward_model(policy, **section):
    shape = {"global_batch_size": 32, "max_num_steps": 2, "seed": 3, **section}
    return RewardModelTrainer(policy, config=shape).train(pairs("train", 512), pairs("validation", 128))


def distillation(policy, teacher, loss):
    generation, environment = HuggingFaceGeneration(str(MODEL), max_new_tokens=5), ArithmeticEnvironment()
    shape = {"num_prompts_per_step": 64, "max_num_steps": 2, "seed": 3, "val_at_start": False, "val_at_end": False}
    parts = {"generation": generation, "environments": {"arithmetic": environment}}
    try:
        return DistillationTrainer(policy, teacher=teacher, config=shape, loss_fn=loss, **parts).train(sums("train", 2048))
    finally:
        generation.shutdown()
        environment.shutdown()


def sft(policy, **section):
    shape = {"global_batch_size": 64, "max_num_steps": 2, "seed": 3, **section}
    return SFTTrainer(policy, config=shape).train(answered("train", 1024), answered("validation", 128))


def dpo(policy, loss=None, **section):
    shape = {"global_batch_size": 32, "max_num_steps": 2, "seed": 3, **section}
    return DPOTrainer(policy, config=shape, loss_fn=loss).train(pairs("train", 512), pairs("validation", 128))


RUNS = {
    "grpo": lambda policy: grpo(policy, {"name": "grpo", "reference_policy_kl_penalty": 0.05}),
    "dapo with dynamic sampling": lambda policy: grpo(policy, {"name": "dapo"}, use_dynamic_sampling=True),
    "dr_grpo": lambda policy: grpo(
        policy, {"name": "dr_grpo", "constant_length_normalizer": 5}, adv_estimator={"normalize_rewards": False}
    ),
    "gspo": lambda policy: grpo(policy, {"name": "gspo"}),
    "cispo": lambda policy: grpo(policy, {"name": "cispo"}),
    "sft": sft,
    "dpo": lambda policy: dpo(policy, {"name": "dpo", "reference_policy_kl_penalty": 0.1}),
    "simpo": lambda policy: dpo(policy, {"name": "simpo"}),
}


FULL = pytest.mark.full("tests/train/algorithms proves the formulas; dapo, dpo and distillation run in CI")
ALWAYS = ("dapo with dynamic sampling", "dpo")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else FULL) for name in RUNS])
def test_its_steps_have_the_numbers_of_the_backend_on_transformers(name, two_ranks, one_rank):
    assert_same_numbers(RUNS[name](two_ranks()), RUNS[name](one_rank))


@pytest.mark.full("test_scalar_head.py compares a critic on ranks with Transformers; tests/train/algorithms the formulas")
def test_an_actor_and_its_critic_have_the_numbers_of_the_backend_on_transformers(two_ranks, two_ranks_of_a_critic, one_rank):
    critic = HuggingFacePolicy(str(MODEL), head="scalar", **FIELDS)
    assert_same_numbers(ppo(two_ranks(), two_ranks_of_a_critic()), ppo(one_rank, critic))
    critic.shutdown()


TOPK = {"divergence": "forward_kl", "topk": 8}
SCORING = {key: value for key, value in FIELDS.items() if key != "optimizer"}


@pytest.fixture
def distilled(one_rank, trained_model):
    """A frozen teacher on Transformers, and the numbers of a student on Transformers."""
    teacher = HuggingFacePolicy(str(trained_model), frozen=True, **SCORING)
    expected = distillation(one_rank, teacher, TOPK)
    assert expected[0]["distillation/kl_forward"] > 0.01
    yield teacher, expected
    teacher.shutdown()


def test_a_student_has_the_numbers_of_the_backend_on_transformers(two_ranks, distilled):
    teacher, expected = distilled
    assert_same_numbers(distillation(two_ranks(), teacher, TOPK), expected)


@pytest.mark.full("test_candidates.py compares top-k tokens of ranks, and of a frozen policy, with Transformers")
def test_a_teacher_on_two_ranks_has_the_numbers_of_the_backend_on_transformers(two_ranks, cluster, distilled, trained_model):
    from rl_backends_megatron import MegatronPolicy

    staged = {"pipeline_model_parallel_size": 2, "frozen": True, "name": "teacher"}
    teacher = MegatronPolicy(str(trained_model), cluster=cluster, **staged, **SCORING)
    assert_same_numbers(distillation(two_ranks(), teacher, TOPK), distilled[1])
    teacher.shutdown()


@pytest.mark.full("test_scalar_head.py compares a critic on ranks with Transformers; tests/train/algorithms the formulas")
def test_a_reward_model_has_the_numbers_of_the_backend_on_transformers(two_ranks_of_a_critic):
    judge = HuggingFacePolicy(str(MODEL), head="scalar", **FIELDS)
    assert_same_numbers(reward_model(two_ranks_of_a_critic()), reward_model(judge))
    judge.shutdown()


def assert_same_numbers(found, expected):
    assert len(found) == len(expected) == 2
    assert expected[0]["grad_norm"] > 1e-3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            # Float32 sums in another order, over several optimizer steps.
            if not (key.startswith(CLOCKS) or key.endswith(("_s", "_gib", "/idle_frac"))):
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (ours["step"], key)


@pytest.mark.full("the tests above compare every number with the backend on Transformers, which learns in tests/e2e")
def test_training_with_rewards_generalizes_to_unseen_sums(two_ranks):
    steps = grpo(two_ranks(), num_prompts_per_step=32, max_num_steps=8, **WATCHED)
    # 0.60 of the held-out sums are right at first; the standard error of 128 answers is 0.04.
    assert steps[-1]["validation/accuracy"] > steps[0]["validation/accuracy"] + 0.1


@pytest.mark.full("the tests above compare every number with the backend on Transformers, which learns in tests/e2e")
def test_supervised_training_lowers_the_loss_on_unseen_answers(two_ranks):
    steps = sft(two_ranks(), max_num_steps=12, **WATCHED)
    assert steps[-1]["validation/loss"] < 0.9 * steps[0]["validation/loss"]


@pytest.mark.full("the tests above compare every number with the backend on Transformers, which learns in tests/e2e")
def test_a_reward_model_generalizes_to_unseen_pairs(two_ranks_of_a_critic):
    steps = reward_model(two_ranks_of_a_critic(), max_num_steps=30, **WATCHED)
    # A head of zeros cannot tell them apart; the standard error of 128 pairs is 0.04.
    assert steps[0]["validation/accuracy"] == 0.5
    assert steps[-1]["validation/accuracy"] > 0.65


@pytest.mark.full("the tests above compare every number with the backend on Transformers, which learns in tests/e2e")
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_preference_training_generalizes_to_unseen_pairs(loss, two_ranks):
    steps = dpo(two_ranks(), {"name": loss}, max_num_steps=10, **WATCHED)
    # Ties of a policy with its own copy count half; without a reference, the policy prefers its own answers.
    assert steps[0]["validation/accuracy"] <= 0.5
    assert steps[-1]["validation/accuracy"] > 0.9


def rows_for_the_model(num_rows=8):
    """Rows with tokens of the model's vocabulary; not the padding token, whose embedding Transformers gives no gradient."""
    rows = cases.make_rows(num_rows, width=14)
    rows["input_ids"] = 3 + rows["input_ids"] % (transformers.AutoConfig.from_pretrained(MODEL).vocab_size - 3)
    return rows


@pytest.mark.parametrize("loss_fn", [NLLLossFn(), GRPOLossFn()], ids=["nll", "grpo"])
def test_losses_of_the_core_have_the_numbers_of_the_backend_on_transformers(two_ranks, one_rank, loss_fn):
    both = two_ranks(), one_rank
    rows = rows_for_the_model(6)
    mask, generator = rows["token_mask"], torch.Generator().manual_seed(2)
    logprobs = one_rank.get_logprobs(rows)["logprobs"]
    rows["advantages"] = torch.randn(6, 1, generator=generator) * mask
    rows["generation_logprobs"] = logprobs * mask
    rows["prev_logprobs"] = (logprobs + 0.1 * torch.randn(mask.shape, generator=generator)) * mask
    rows["reference_policy_logprobs"] = (logprobs - 0.2) * mask
    for verb in ("get_logprobs", "get_reference_policy_logprobs"):
        (key, scored), (_, other) = (next(iter(getattr(each, verb)(rows).items())) for each in both)
        assert scored.shape == rows["input_ids"].shape
        assert float((scored - other).abs().max()) < 1e-4, key
    for each in both:
        each.prepare_for_training()
    # One step: Adam would make large ones of rounding errors in small gradients.
    found, expected = (each.train(rows, loss_fn, gbs=6, mbs=2) for each in both)
    assert found["num_optimizer_steps"] == expected["num_optimizer_steps"] == 1
    for key in ("loss", "grad_norm", "lr", "global_valid_toks"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert found["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert [each.weight_version for each in both] == [1, 1]


def test_greedy_samples_equal_those_of_the_transformers_policy(two_ranks, one_rank):
    prompts = BatchedDataDict(
        input_ids=torch.tensor([[5, 9, 11], [7, 8, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])
    )
    prompts["max_new_tokens"] = torch.tensor([5, 5])
    found, expected = (each.generate(prompts, greedy=True) for each in (two_ranks(), one_rank))
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "truncated", "weight_version"):
        assert torch.equal(found[key], expected[key]), key
    assert float((found["logprobs"] - expected["logprobs"]).abs().max()) < 1e-4


def test_exported_weights_equal_those_of_the_transformers_policy(two_ranks, one_rank, tmp_path):
    ours, rows = two_ranks(), rows_for_the_model()
    ours.prepare_for_training()
    ours.train(rows, NLLLossFn())
    assert dict(ours.prepare_refit_info()).keys() == dict(one_rank.prepare_refit_info()).keys()
    ours.save_checkpoint(tmp_path / "stepped")
    again = HuggingFacePolicy(str(tmp_path / "stepped"))
    assert ours.weight_fingerprint() == again.weight_fingerprint() != one_rank.weight_fingerprint()
    buckets = ours.prepare_weights_for_ipc(budget_bytes=20_000)
    assert len(buckets) > 2
    assert sorted(name for bucket in buckets for name in bucket) == sorted(ours.prepare_refit_info())
    handles = ours.get_weights_ipc_handles(buckets[1])
    assert handles["weight_version"] == ours.weight_version
    ours.finish_refit()


def plain_scores(folder, rows):
    with torch.no_grad():
        return cases.plain_logprobs(cases.plain_model(folder), rows)


def test_a_converted_checkpoint_scores_in_transformers_as_the_ranks_did(two_ranks, tmp_path):
    policy, rows = two_ranks(), rows_for_the_model()
    policy.prepare_for_training()
    for _ in range(5):
        policy.train(rows, NLLLossFn())
    expected = policy.get_logprobs(rows)["logprobs"]
    checkpoints = Checkpoints(
        store=CheckpointStore(tmp_path / "checkpoints"),
        models={"policy": policy},
        parts={},
        config=ComparedConfig(values={"policy": {"backend": "megatron", "model_name": str(MODEL)}}, algorithm="sft"),
        save_optimizer=True,
        tokenizer=transformers.AutoTokenizer.from_pretrained(MODEL),
    )
    convert(checkpoints.save(1, {}), tmp_path / "model", to="hf")
    assert float((plain_scores(tmp_path / "model", rows) - expected).abs().max()) < 1e-5
    assert float((plain_scores(MODEL, rows) - expected).abs().max()) > 0.1


class DeadlyOnRankOne(LossFunction):
    """Kills the process that computes it on rank 1."""

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_token_logprobs.sum(), {}


def test_a_rank_that_dies_during_a_step_is_named_in_the_error(two_ranks):
    # Workers cannot import a test's module, so the loss travels by value. No test after this one uses the policy.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*tensor=1.* of 'policy'"):
        two_ranks().train(rows_for_the_model(), DeadlyOnRankOne())
