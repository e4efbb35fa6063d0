"""Dynamic sampling fills a step with informative groups: whole groups, within the bound, a limit, counts of the rest."""

import json
from types import SimpleNamespace

import pytest
import torch
from scheduled_sources import scheduled_source

from rl_core.errors import RLCoreError
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.grpo import only_informative
from rl_train.algorithms.policy_configs import AdvantageConfig, GRPOConfig
from rl_train.algorithms.rewards import RewardShaping
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import RolloutLoop

GROUP = 4
ALL, NONE, ONE, MOST = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]


class Engine:
    """The part of an engine that a source calls."""

    version = 3

    def prepare_for_generation(self): ...

    def await_weights(self): ...


class Scripted:
    """Plays the group of prompt i with the i-th rewards of a script; the sampled token of a row is its number in the script."""

    def __init__(self, *rewards, truncated=(), threaded=False):
        self.rewards, self.truncated = list(rewards), set(truncated)
        self.environments, self.generation, self.loop = {}, Engine(), RolloutLoop(threaded=threaded)
        self.begun_together = []

    async def play(self, trajectories, *, stream):
        self.begun_together.append([row.ordinal for row in trajectories[::GROUP]])
        for row in trajectories:
            number = row.ordinal * GROUP + row.sample
            row.add_answer("", torch.tensor([number]), torch.tensor([-1.0]), weight_version=self.generation.version)
            row.add_rewards({"reward": self.rewards[row.ordinal][row.sample]})
            row.truncated = number in self.truncated


@pytest.fixture
def source():
    loops = []

    def make(collector, *, k=0, demand=2):
        loops.append(collector.loop)
        prompt = {"message_log": [{"role": "user", "content": "q", "token_ids": torch.tensor([], dtype=torch.int64)}]}
        rest = {"length": 0, "extra_env_info": None, "task_name": "t", "loss_multiplier": 1.0}
        datums = [{**prompt, **rest, "idx": index} for index in range(len(collector.rewards))]
        loader = BatchedDataLoader(datums, batch_size=2, shuffle=False, collate=list)
        version = lambda: collector.generation.version  # noqa: E731
        bound = {"max_staleness": k, "ahead": min(k, 1), "demand": demand}
        return scheduled_source(collector, loader, weight_version=version, group_size=GROUP, **bound)

    yield make
    for loop in loops:
        loop.close()


def draw(source, *, step=3, shape=None, estimator="grpo", **fields):
    fields = {"num_prompts_per_step": 2, "num_generations_per_prompt": GROUP, "use_dynamic_sampling": True, **fields}
    is_informative = make_estimator(AdvantageConfig(name=estimator)).is_informative
    config = GRPOConfig(**fields)
    shape = shape or RewardShaping(config, SimpleNamespace(policy=SimpleNamespace(generation=None)))
    selection = only_informative(config, shape, is_informative) if config.use_dynamic_sampling else None
    found = source.take(step, config.num_prompts_per_step, selection)
    found.metrics.update(shape(found.batch))
    return found


def groups_of(found):
    return [row.ordinal for row in found.trajectories[::GROUP]]


def test_equal_groups_are_dropped_whole_and_further_prompts_are_drawn(source):
    collector = Scripted(ALL, ONE, NONE, NONE, MOST, ALL)
    found = draw(source(collector))
    assert collector.begun_together == [[0, 1], [2], [3], [4]]
    # Rows 4..7 and 16..19 of the script, with their odd ones.
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert found.batch["group_ids"].tolist() == [0] * 4 + [1] * 4
    assert [row.group_id for row in found.trajectories] == [0] * 4 + [1] * 4
    assert found.batch["rewards"].tolist() == ONE + MOST


def later_rows_lose(batch):
    """Shaping under which the rewards of every group differ."""
    penalty = torch.arange(batch.size) % 4 / 8
    batch["rewards"] = batch["rewards"] - penalty
    batch["reward_parts"] = [
        {**parts, "overlong": -float(lost)} for parts, lost in zip(batch["reward_parts"], penalty, strict=True)
    ]
    return {"reward/shaped": float(batch["rewards"].mean())}


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
def test_groups_are_filtered_by_the_rewards_of_the_environment_and_trained_on_the_shaped_ones(source, estimator):
    found = draw(source(Scripted(NONE, ONE, ALL, MOST)), shape=later_rows_lose, estimator=estimator)
    # A group with no or only correct answers is dropped although its shaped rewards differ.
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert found.batch["rewards"].tolist() == [1.0, -0.125, -0.25, -0.375, 0.0, 0.875, 0.75, 0.625]
    assert found.metrics["dynamic_sampling/dropped_groups"] == 2.0


def test_a_group_whose_shaped_rewards_are_equal_is_dropped_as_well(source):
    def clip(batch):
        batch["rewards"] = batch["rewards"].clamp(max=0.0)
        return {}

    found = draw(source(Scripted(ONE, [0.0, -1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0], ALL)), shape=clip)
    assert found.batch["rewards"].tolist() == [0.0, -1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_dropped_groups_are_counted_and_metrics_include_them(source):
    found = draw(source(Scripted(ALL, ONE, NONE, NONE, MOST, ONE)))
    counts = {name.split("/")[1]: value for name, value in found.metrics.items() if name.startswith("dynamic_sampling/")}
    assert counts == {"dropped_groups": 3.0, "surplus_groups": 0.0, "missing_groups": 0.0}
    assert found.metrics["reward/mean"] == (4 + 1 + 3) / 20
    assert found.metrics["rollout/rows"] == 20.0
    assert found.batch.size == 8


def test_later_draws_take_only_the_missing_groups(source):
    collector = Scripted(ALL, ONE, NONE, MOST, ONE, ONE)
    found = draw(source(collector), batch_multiplier=1.5)
    assert collector.begun_together == [[0, 1, 2], [3, 4]]  # 1 is missing, times 1.5
    assert groups_of(found) == [1, 3]
    assert found.metrics["dynamic_sampling/surplus_groups"] == 1.0


def test_reaching_the_limit_of_groups_gives_a_smaller_step_with_a_metric(source):
    collector = Scripted(ALL, ONE, NONE, NONE, MOST, ONE)
    found = draw(source(collector), dynamic_sampling_max_gen_batches=2)
    assert groups_of(found) == [1]
    assert found.metrics["dynamic_sampling/missing_groups"] == 1.0
    assert collector.begun_together == [[0, 1], [2], [3]]


def test_a_step_without_reward_differences_is_reported(source):
    with pytest.raises(RLCoreError, match=r"Step 3 sampled 4 groups and could use none of them\. All rewards were equal"):
        draw(source(Scripted(ALL, ALL, NONE, NONE, ONE)), dynamic_sampling_max_gen_batches=2)


def test_a_group_with_only_truncated_rows_is_not_trained(source):
    found = draw(source(Scripted(ONE, ONE, MOST, ALL, truncated=range(4))), overlong_filtering=True)
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert found.metrics["dynamic_sampling/dropped_groups"] == 1.0


def test_without_dynamic_sampling_a_draw_is_used_unchanged(source):
    found = draw(source(Scripted(ALL, ONE, truncated=[5])), use_dynamic_sampling=False, overlong_filtering=True)
    assert found.batch["input_ids"].flatten().tolist() == list(range(8))
    assert found.batch["sample_mask"].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert "dynamic_sampling/dropped_groups" not in found.metrics


@pytest.mark.parametrize("multiplier", [1.0, 1.5])
def test_rollouts_sampled_ahead_are_filtered_within_the_bound_and_surplus_groups_are_kept_for_the_next_step(source, multiplier):
    collector = Scripted(*[ONE, ALL, MOST, NONE] * 30, threaded=True)
    drawn = source(collector, k=1)
    trained, dropped, surplus, ages = [], 0.0, 0.0, set()
    for step in range(1, 11):
        found = draw(drawn, step=step, batch_multiplier=multiplier)
        collector.generation.version += 1
        trained += groups_of(found)
        dropped += found.metrics["dynamic_sampling/dropped_groups"]
        surplus += found.metrics["dynamic_sampling/surplus_groups"]
        ages.add(found.metrics["staleness/steps_max"])
    assert len(trained) == len(set(trained)) == 20
    assert all(ordinal % 2 == 0 for ordinal in trained)
    assert ages == {0.0, 1.0}
    rest = drawn.state_dict()["again"]
    drawn_in_all = max([*trained, *rest]) + 1
    assert len(trained) + dropped + surplus + len(rest) >= drawn_in_all - 1  # one dropped group may not be in a metric yet
    assert surplus == 0.0 or multiplier > 1


@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_a_resumed_run_trains_the_same_groups_as_an_uninterrupted_one(source, multiplier):
    script = [ALL, ONE, MOST, NONE, ONE] * 12
    whole, parts = source(Scripted(*script)), source(Scripted(*script))
    for step in range(1, 8):
        expected = groups_of(draw(whole, step=step, batch_multiplier=multiplier))
        assert groups_of(draw(parts, step=step, batch_multiplier=multiplier)) == expected
        state = json.loads(json.dumps(parts.state_dict()))
        parts = source(Scripted(*script))
        parts.load_state_dict(state)


def test_a_multiplier_draws_more_prompts_at_once():
    assert GRPOConfig(num_prompts_per_step=6, use_dynamic_sampling=True, batch_multiplier=1.5).prompts_per_draw == 9
