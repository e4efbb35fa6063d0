"""Dynamic sampling draws until a step is full: whole groups, distinct ids, a limit, and counts of dropped groups."""

import pytest
import torch

from rl_core.errors import RLCoreError
from rl_train.algorithms.dynamic_sampling import draw_rollouts
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.grpo_config import AdvantageConfig, GRPOConfig
from rl_train.rollouts.source import Rollouts, RolloutSource
from rl_train.rollouts.trajectory import Trajectory, to_batch


class Scripted(RolloutSource):
    """Returns scripted draws of groups of rewards; the sampled token of a row is its index in the script."""

    def __init__(self, *draws, truncated=()):
        self.draws, self.truncated = list(draws), set(truncated)
        self.asked, self.groups_asked = [], []
        self.rows = 0

    def take(self, step, groups):
        self.asked.append(step)
        self.groups_asked.append(groups)
        trajectories = []
        for group, rewards in enumerate(self.draws.pop(0)):
            for sample, reward in enumerate(rewards):
                place = {"group_id": group, "index": group, "ordinal": group, "sample": sample}
                row = Trajectory(message_log=[], metadata=None, task_name="t", **place)
                row.add_answer("", torch.tensor([self.rows]), torch.tensor([-1.0]))
                row.add_rewards({"reward": reward})
                row.truncated = self.rows in self.truncated
                trajectories.append(row)
                self.rows += 1
        metrics = {"reward/mean": float(len(self.asked)), "rollout/rows": float(len(trajectories)), "length/max": 5.0}
        return Rollouts(batch=to_batch(trajectories), metrics=metrics, trajectories=trajectories)

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def draw(source, *, shape=lambda batch: {}, estimator="grpo", **fields):
    fields = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "use_dynamic_sampling": True, **fields}
    is_informative = make_estimator(AdvantageConfig(name=estimator)).is_informative
    return draw_rollouts(source, 3, config=GRPOConfig(**fields), shape=shape, is_informative=is_informative)


ALL, NONE, ONE, MOST = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]


def test_equal_groups_are_dropped_whole_and_further_prompts_are_drawn():
    source = Scripted([ALL, ONE], [NONE, NONE], [MOST, ALL])
    found = draw(source)
    assert source.asked == [3, 3, 3]
    # Rows 4..7 of the first draw, 16..19 of the third: with their odd one, and under ids that do not collide.
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert found.batch["group_ids"].tolist() == [0] * 4 + [1] * 4
    assert [row.group_id for row in found.trajectories] == [0] * 4 + [1] * 4
    assert [int(row.token_ids()) for row in found.trajectories] == found.batch["input_ids"].flatten().tolist()
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
def test_groups_are_filtered_by_the_rewards_of_the_environment_and_trained_on_the_shaped_ones(estimator):
    found = draw(Scripted([NONE, ONE], [ALL, MOST]), shape=later_rows_lose, estimator=estimator)
    # A group with no or only correct answers is dropped although its shaped rewards differ.
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert found.batch["rewards"].tolist() == [1.0, -0.125, -0.25, -0.375, 0.0, 0.875, 0.75, 0.625]
    assert found.metrics["dynamic_sampling/dropped_groups"] == 2.0


def test_a_group_whose_shaped_rewards_are_equal_is_dropped_as_well():
    def clip(batch):
        batch["rewards"] = batch["rewards"].clamp(max=0.0)
        return {}

    found = draw(Scripted([ONE, [0.0, -1.0, 0.0, 0.0]], [[-1.0, 0.0, 0.0, 0.0], ALL]), shape=clip)
    assert found.batch["rewards"].tolist() == [0.0, -1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_dropped_groups_are_counted_and_metrics_include_them():
    found = draw(Scripted([ALL, ONE], [NONE, NONE], [MOST, ONE]))
    counts = {name.split("/")[1]: value for name, value in found.metrics.items() if name.startswith("dynamic_sampling/")}
    assert counts == {"draws": 3.0, "dropped_groups": 3.0, "surplus_groups": 1.0, "missing_groups": 0.0}
    assert found.metrics["reward/mean"] == 2.0
    assert found.metrics["rollout/rows"] == 24.0
    assert found.metrics["length/max"] == 5.0
    assert found.batch.size == 8


def test_later_draws_take_only_the_missing_groups():
    source = Scripted([ALL, ONE, NONE], [MOST, ONE])
    found = draw(source, batch_multiplier=1.5)
    assert source.groups_asked == [3, 2]  # 1 is missing, times 1.5
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert found.metrics["dynamic_sampling/surplus_groups"] == 1.0


def test_reaching_the_draw_limit_gives_a_smaller_step_with_a_warning():
    source = Scripted([ALL, ONE], [NONE, NONE], [MOST, ONE])
    found = draw(source, dynamic_sampling_max_gen_batches=2)
    assert found.batch.size == 4
    assert found.metrics["dynamic_sampling/missing_groups"] == 1.0
    assert len(source.draws) == 1


def test_a_step_without_reward_differences_is_reported():
    with pytest.raises(RLCoreError, match="drew 4 prompts in 2 draws, but all rewards were equal within their group"):
        draw(Scripted([ALL, ALL], [NONE, NONE]), dynamic_sampling_max_gen_batches=2)


def test_a_group_with_only_truncated_rows_is_not_trained():
    found = draw(Scripted([ONE, ONE], [MOST, ALL], truncated=range(4)), overlong_filtering=True)
    assert found.batch["input_ids"].flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert found.metrics["dynamic_sampling/draws"] == 2.0


def test_without_dynamic_sampling_a_draw_is_used_unchanged():
    found = draw(Scripted([ALL, ONE], truncated=[5]), use_dynamic_sampling=False, overlong_filtering=True)
    assert found.batch["input_ids"].flatten().tolist() == list(range(8))
    assert found.batch["sample_mask"].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert "dynamic_sampling/draws" not in found.metrics


def test_a_multiplier_draws_more_prompts_at_once():
    assert GRPOConfig(num_prompts_per_step=6, use_dynamic_sampling=True, batch_multiplier=1.5).prompts_per_draw == 9
