"""Segments of a rollout share its advantage: statistics count rollouts, and the loss counts trained tokens."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.config.schema import DatasetConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import grpo
from rl_train.algorithms.estimators import AdvantageEstimator, Advantages, PerRollout, make_estimator
from rl_train.algorithms.grpo import only_informative
from rl_train.algorithms.losses.config import AdaptiveKLConfig, ClippedPGLossConfig
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.policy_configs import AdvantageConfig, GRPOConfig, RewardShapingConfig
from rl_train.algorithms.rewards import KLInReward, RewardShaping
from rl_train.config.schema import DataConfig, RunConfig
from rl_train.rollouts.source import Rollouts, RolloutSource
from rl_train.rollouts.trajectory import Trajectory, join_segments, split_segments, to_batch

VOCABULARY = 32
TURNS = [[3], [1, 2], [2, 1, 1], [2], [1, 1], [4]]
"""Sampled tokens of each turn of six rollouts."""
REWARDS = [1.0, 0.0, 2.0, 0.5, 0.5, 3.0]


def rollouts_of(*, rewritten, seed=0):
    """Six rollouts in two groups; with `rewritten`, each turn starts a segment with another prompt."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(1, VOCABULARY, (count,), generator=draw)

    found = []
    for number, (turns, reward) in enumerate(zip(TURNS, REWARDS, strict=True)):
        rollout = Trajectory(
            message_log=[{"role": "user", "content": "q", "token_ids": tokens(2)}],
            metadata=None,
            task_name="t",
            group_id=number // 3,
            index=number // 3,
            ordinal=number // 3,
            sample=number % 3,
        )
        for turn, count in enumerate(turns):
            if turn:
                observation, prompt = {"role": "user", "content": "o"}, tokens(3)
                (rollout.start_segment if rewritten else rollout.add_observation)(observation, prompt)
            rollout.add_answer("a", tokens(count), -torch.rand(count, generator=draw))
            rollout.add_rewards({"reward": reward if turn == len(turns) - 1 else 0.0})
        found.append(rollout)
    return found


class Fixed(RolloutSource):
    def __init__(self, rewritten):
        self.rewritten = rewritten

    def take(self, step, groups, selection=None):
        trajectories = rollouts_of(rewritten=self.rewritten)
        return Rollouts(batch=to_batch(trajectories), metrics={}, trajectories=trajectories)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


ESTIMATORS = [
    {"name": "grpo"},
    {"name": "rloo"},
    {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus", "minus_baseline": True},
    {"name": "gdpo"},
]


@pytest.mark.parametrize("config", ESTIMATORS, ids=lambda config: "-".join(map(str, config.values())))
@pytest.mark.parametrize("penalized", [False, True])
def test_advantages_and_their_statistics_are_those_of_the_same_rollouts_without_segments(config, penalized):
    whole, parts = (join_segments(to_batch(rollouts_of(rewritten=rewritten))) for rewritten in (False, True))
    assert split_segments(parts).size == sum(map(len, TURNS))
    for batch in (whole, parts):
        batch["scored"] = batch["scored"] & (batch["rollout_ids"] != 3)
        mask = batch["token_mask"] > 0
        penalties = torch.zeros(mask.shape)
        penalties[mask] = torch.linspace(0.0, 1.0, int(mask.sum()))
        if penalized:
            batch["token_penalties"] = penalties
    one, other = (make_estimator(AdvantageConfig(**config))(batch) for batch in (whole, parts))
    torch.testing.assert_close(other.values[parts["token_mask"] > 0], one.values[whole["token_mask"] > 0])
    assert other.values[parts["token_mask"] == 0].abs().sum() == 0
    assert other.metrics == pytest.approx(one.metrics)
    informative = make_estimator(AdvantageConfig(**config)).is_informative
    assert informative(parts).tolist() == informative(whole).tolist()


class OwnEstimator(AdvantageEstimator):
    def __call__(self, batch: BatchedDataDict) -> Advantages:
        return Advantages(values=(batch["rewards"] - batch["rewards"].mean()).unsqueeze(-1) * batch["token_mask"], metrics={})


def test_an_estimator_given_by_its_path_sees_one_row_per_rollout():
    whole, parts = (to_batch(rollouts_of(rewritten=rewritten)) for rewritten in (False, True))
    estimate = PerRollout(make_estimator(AdvantageConfig(name=f"{__name__}.OwnEstimator")))
    one, other = estimate(whole).values, estimate(parts).values
    assert other[parts["token_mask"] > 0].tolist() == one[whole["token_mask"] > 0].tolist()
    assert estimate.is_informative(parts).shape == (parts.size,)


def test_the_length_penalty_counts_the_tokens_of_all_segments():
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=3, max_response_length=4)
    config = GRPOConfig(reward_shaping=shaping, num_prompts_per_step=2, num_generations_per_prompt=3)
    shape = RewardShaping(config, SimpleNamespace(policy=SimpleNamespace(generation=None)))
    found = {}
    for rewritten in (False, True):
        rows = join_segments(to_batch(rollouts_of(rewritten=rewritten)))
        metrics = shape(rows)
        found[rewritten] = (rows["rewards"].tolist(), rows["reward_parts"], metrics)
    assert found[True] == found[False]


def test_dynamic_sampling_judges_a_group_with_all_rows_of_its_rollouts():
    config = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=3, use_dynamic_sampling=True)
    selection = only_informative(config, lambda batch: {}, make_estimator(AdvantageConfig()).is_informative)
    trajectories = rollouts_of(rewritten=True)
    for row in trajectories[:3]:
        row.reward_parts, row.reward = {"reward": 1.0}, 1.0
    assert [selection.keep(trajectories[:3]), selection.keep(trajectories[3:6])] == [False, True]


def test_an_adaptive_kl_penalty_counts_the_kl_of_whole_answers():
    adaptive = AdaptiveKLConfig(target=1.0, horizon=1000)
    config = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True, adaptive_kl=adaptive)
    weights, metrics = [], []
    for rewritten in (False, True):
        batch = join_segments(to_batch(rollouts_of(rewritten=rewritten)))
        batch["prev_logprobs"] = -torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(1))
        batch["reference_policy_logprobs"] = batch["prev_logprobs"] - 0.3
        penalty = KLInReward(config)
        metrics.append(penalty(batch))
        weights.append(penalty.controller.weight)
    assert weights[0] == pytest.approx(weights[1])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def logprobs_of(model, batch):
    """Log-probabilities [B, T] of each row by itself, by Transformers alone."""
    found = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length]
        logits = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        found[row, 1:length] = logits.gather(1, ids[1:, None])[:, 0]
    return found


LEARNING_RATE = 0.5


def reference_step(folder, rollouts_per_update):
    """A GRPO step written out: for each update, the mean of the clipped surrogate over the tokens of its rollouts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = to_batch(rollouts_of(rewritten=True))
    with torch.no_grad():
        before = logprobs_of(model, batch)
    rewards = torch.tensor(REWARDS).view(2, 3)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for start in range(0, 6, rollouts_per_update):
        total, tokens = torch.zeros(()), 0
        now = logprobs_of(model, batch)
        for row, rollout in enumerate(batch["rollout_ids"].tolist()):
            if not start <= rollout < start + rollouts_per_update:
                continue
            for position in batch["token_mask"][row].nonzero().flatten().tolist():
                ratio = (now[row, position] - before[row, position]).exp()
                advantage = advantages[rollout]
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                tokens += 1
        optimizer.zero_grad()
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.mark.parametrize("rollouts_per_update", [None, 2])
def test_a_grpo_step_on_segments_equals_one_written_out_by_hand(model_folder, tmp_path, rollouts_per_update):
    section = HFPolicyConfig(
        backend="hf",
        model_name=model_folder,
        max_total_sequence_length=32,
        train_global_batch_size=rollouts_per_update,
        train_micro_batch_size=3,
        max_grad_norm=1.0,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": LEARNING_RATE}},
    )
    config = RunConfig(
        algorithm_name="grpo",
        algorithm=GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=3, max_num_steps=1, val_period=0),
        loss_fn=ClippedPGLossConfig(),
        policy=section,
        data=DataConfig(train=DatasetConfig(dataset_name="arithmetic")),
        cluster={"backend": "in_process"},
        checkpointing={"enabled": False},
    )
    policy = HuggingFacePolicy(config=section)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    loss_fn.on_policy = True  # as another run with the same loss may have left it
    records, metrics = [], {}
    run = grpo.Run(
        config=config,
        folder=tmp_path,
        policy=policy,
        loss_fn=loss_fn,
        loggers=[],
        checkpoints=None,
        tokenizer=None,
        weights=SimpleNamespace(sync=lambda only_if_stale: {}),
        rollouts=Fixed(True),
        on_rollouts=lambda rows, step: records.extend(rows),
        on_step=lambda step, found: metrics.update(found),
    )
    run.estimator = make_estimator(config.algorithm.adv_estimator)
    grpo.train(config.algorithm, run)
    assert policy.weight_version == 6 // (rollouts_per_update or 6)
    expected = reference_step(model_folder, rollouts_per_update or 6)
    for name, tensor in policy.group._worker.iter_weights():
        # The step moves weights by about 0.1; this is five digits of it.
        torch.testing.assert_close(tensor, expected.get_parameter(name).data, rtol=0, atol=1e-6)
    assert metrics["tokens/trained"] == sum(map(sum, TURNS))
    rewards = torch.tensor(REWARDS).view(2, 3)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()
    assert [record["advantage"] for record in records] == pytest.approx(advantages.tolist(), rel=1e-5)
