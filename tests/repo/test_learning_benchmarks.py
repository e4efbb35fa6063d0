"""The learning benchmarks: demonstrations that partly succeed, valid configs, and intervals."""

import json
import random
import sys
from itertools import islice
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config

LEARNING = Path(__file__).parents[2] / "benchmarks" / "learning"
TASKS = ("code", "reasoning_gym", "sliding_puzzle", "tools")


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    pytest.importorskip("reasoning_gym")
    sys.path.insert(0, str(LEARNING))
    yield
    sys.path.remove(str(LEARNING))


@pytest.mark.parametrize("name", TASKS)
def test_some_demonstrations_of_each_task_succeed_and_most_do_not(name):
    from tasks import TASKS as tasks

    task = tasks[name]
    if task.problems is None:
        registry = Registry(discover())
        records = Preparation(load_config(LEARNING / f"{name}.yaml", [], registry=registry).run, registry).data.train.records
    else:
        records = random.Random(0).sample(list(islice(task.problems(), 1600)), 100)
    draw, won = random.Random(0), 0
    for index in range(100):
        record = records[index]
        said = [m["content"] or "" for m in task.demonstrate(record, draw) if m["role"] == "assistant"]
        won += task.succeeded(record["messages"][-1]["content"], "".join(said))
    assert 10 <= won <= 60


def test_the_success_of_a_game_is_its_reward_also_after_illegal_moves():
    from tasks import MOVES
    from tasks import TASKS as tasks

    from rl_envs.sliding_puzzle import SlidingPuzzleDataset, SlidingPuzzleEnvironment

    environment, draw, rewards = SlidingPuzzleEnvironment({"max_moves": MOVES}), random.Random(0), []
    for record in SlidingPuzzleDataset({"num_samples": 100, "max_shuffles": 3}):
        state, texts, reward, done = record["extra_env_info"], [], 0.0, False
        while not done:
            texts.append(draw.choice([*(f"<move>{way}</move>" for way in ("up", "down", "left", "right", "5", "8", "9")), "!"]))
            made = environment.step([[{"role": "assistant", "content": texts[-1]}]], [state])
            state, done, reward = made.metadata[0], bool(made.terminateds[0]), reward + float(made.rewards["solved"][0])
        rewards.append(reward)
        prompt = record["messages"][-1]["content"]
        assert tasks["sliding_puzzle"].succeeded(prompt, "".join(texts)) == (reward == 1.0)
    assert 10 < sum(rewards) < 60


def test_the_success_of_guesses_is_their_reward_also_after_unreadable_ones():
    from tasks import GUESSES
    from tasks import TASKS as tasks

    from rl_envs.guess import GuessNumberEnvironment

    environment, draw, rewards = GuessNumberEnvironment({"max_guesses": GUESSES}), random.Random(0), []
    for record in islice(tasks["guess"].problems(), 0, None, 3):
        state, texts, reward, done = record["extra_env_info"], [], 0.0, False
        near = range(state["secret"] - 5, state["secret"] + 6)
        while not done:
            texts.append(draw.choice([*(f" {number}" for number in near), " ?", f" {state['secret']}0"]))
            made = environment.step([[{"role": "assistant", "content": texts[-1]}]], [state])
            state, done, reward = made.metadata[0], bool(made.terminateds[0]), reward + float(made.rewards[0])
        rewards.append(reward)
        assert tasks["guess"].succeeded(record["messages"][-1]["content"], "".join(texts)) == (reward == 1.0)
    assert 15 < sum(rewards) < 100


def test_demonstrated_guesses_partly_succeed_and_do_not_reveal_the_secret_of_their_range():
    from tasks import GUESSES
    from tasks import TASKS as tasks

    task, draw, short, revealed = tasks["guess"], random.Random(0), 0, 0
    problems = random.Random(0).sample(list(task.problems()), 100)
    for record in problems:
        said = [m["content"] for m in task.demonstrate(record, draw) if m["role"] == "assistant"]
        short += len(said) < GUESSES
        revealed += said[-1].strip() == str(record["extra_env_info"]["secret"])
    assert 10 <= short <= 60
    assert revealed <= 15


def test_each_range_of_the_guessing_game_is_one_problem_and_enough_are_held_out():
    from tasks import TASKS as tasks
    from tasks import is_held_out

    problems = list(tasks["guess"].problems())
    assert len({record["messages"][-1]["content"] for record in problems}) == len(problems)
    assert sum(is_held_out(record) for record in problems) >= 50
    for record in problems:
        low, high = (int(word.strip(".")) for word in record["messages"][-1]["content"].split() if word.strip(".").isdigit())
        assert low <= record["extra_env_info"]["secret"] <= high


def test_rollouts_whose_reward_is_not_their_success_are_counted(tmp_path):
    from run import disagreements
    from tasks import TASKS as tasks

    (tmp_path / "rollouts").mkdir()
    for step, rewards in enumerate(([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])):
        completions = ("\\boxed{6}", "\\boxed{7}")
        rows = [{"prompt": "2 * 3?", "completion": c, "reward": r} for c, r in zip(completions, rewards, strict=True)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
    counts = {"rollouts": 4, "full_reward_without_success": 1, "success_without_full_reward": 1}
    assert disagreements(tmp_path, tasks["tools"]) == counts


def test_the_data_of_a_benchmark_is_refused_if_held_out_problems_are_trained():
    from run import training_records

    few = ["data.train.num_samples=300", "data.validation.num_samples=100"]
    assert len(training_records(LEARNING / "sliding_puzzle.yaml", few)) == 300
    with pytest.raises(AssertionError, match="held-out problems are in the training data"):
        training_records(LEARNING / "sliding_puzzle.yaml", [*few, "data.train.split=validation"])


def test_the_agent_succeeds_if_both_of_its_sums_are_right(monkeypatch):
    monkeypatch.syspath_prepend(str(LEARNING.parents[1]))
    from run import training_records
    from tasks import TASKS as tasks

    succeeded = tasks["agents"].succeeded
    assert succeeded("76+18=", "9494")
    assert not any(succeeded("76+18=", wrong) for wrong in ("94", "9484", "8494", "8484", "94 94", ""))
    assert len(training_records(LEARNING / "agents.yaml", ["data.train.num_samples=300"])) == 300


def test_intervals_of_proportions_and_of_paired_differences():
    from intervals import difference, wilson

    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)  # statsmodels' proportion_confint(8, 10, method="wilson")
    problems = [str(i // 2) for i in range(40)]
    before, after = [False] * 40, [i % 4 < 2 for i in range(40)]
    low, high = difference(problems, before, after)
    assert 0.2 < low < 0.35
    assert 0.65 < high < 0.8
    assert difference(problems, after, after) == (0.0, 0.0)


def test_only_the_loss_of_the_benchmark_trains_on_older_rollouts_without_a_correction(monkeypatch, tmp_path):
    import uncorrected

    config = LEARNING.parents[1] / "examples" / "grpo_addition.yaml"
    stale = ["cluster.backend=ray", "rollout.max_staleness=4"]
    with pytest.raises(InvalidConfigError, match="older samples would bias the gradient"):
        load_config(config, stale)
    uncorrected.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_config(config, [*stale, "++loss_fn.name=uncorrected"], registry=Registry(discover()))
    assert (loaded.run.loss_fn.ratio_to, loaded.run.loss_fn.use_importance_sampling_correction) == ("policy", False)


def test_the_curve_of_several_seeds_is_their_mean_and_the_reward_that_of_the_steps_since_the_last_validation():
    from staleness import points

    seeds = [
        {"held_out_step": [0, 2, 4], "held_out_seconds": [0.0, a, 2 * a], "held_out": [0.0, a, 1.0], "reward": [a, 0, 1, a]}
        for a in (0.2, 0.6)
    ]
    assert points(seeds, "validation/reward", "step") == [(0, 0.0), (2, pytest.approx(0.4)), (4, 1.0)]
    assert points(seeds, "reward/mean", "second") == [
        (pytest.approx(0.4), pytest.approx(0.2)),
        (pytest.approx(0.8), pytest.approx(0.7)),
    ]
